//! Real cards for the self-test: the CUDA driver for the work, NVML for what the driver itself tells.

use std::time::Duration;

use super::health::{EccCounters, GpuProcess, HealthSource, NoHealth, Reading, Replaced};
use super::{Card, Opened};
use crate::gpu::driver::cuda::{Cuda, CudaDevice, CudaGpu, CudaProblem, OLDEST_DEVICE, OLDEST_DRIVER};
use crate::gpu::driver::{Call, DriverError, code, mark};
use crate::gpu::nvml::Management;

/// A card of this machine, not opened yet.
#[derive(Debug, Clone)]
pub struct CudaCard {
    cuda: Cuda,
    about: CudaDevice,
}

impl CudaCard {
    /// The device `ordinal`, or all of them. Takes nothing on the cards.
    ///
    /// # Errors
    /// There is no driver, no such device, the driver or a device is too old for the kernels, or a call failed. Of all devices, those that
    /// are too old are left out, unless none remains.
    pub fn find(ordinal: Option<u32>) -> Result<Vec<CudaCard>, CudaProblem> {
        let cuda = Cuda::open()?;
        if let Some(found) = cuda.version().filter(|found| *found < OLDEST_DRIVER) {
            return Err(CudaProblem::DriverTooOld { found });
        }
        let ordinals = match ordinal {
            Some(ordinal) => ordinal..ordinal + 1,
            None => 0..cuda.count()?.max(1),
        };
        let (mut cards, mut too_old) = (Vec::new(), None);
        for ordinal in ordinals {
            let about = cuda.describe(ordinal)?;
            if about.compute_capability < OLDEST_DEVICE {
                too_old = Some(CudaProblem::DeviceTooOld { ordinal, found: about.compute_capability });
            } else {
                cards.push(CudaCard { cuda, about });
            }
        }
        match too_old {
            Some(problem) if cards.is_empty() => Err(problem),
            _ => Ok(cards),
        }
    }

    /// What the driver says of the card.
    pub fn about(&self) -> &CudaDevice {
        &self.about
    }
}

/// How long NVML has to answer for the first time; after that the test goes on without it.
const MANAGEMENT_LIMIT: Duration = Duration::from_secs(5);

/// NVML's view of a card. A thread asks: an NVML that hangs is no reason not to test the memory.
fn health_of(about: &CudaDevice) -> Box<dyn HealthSource> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let (uuid, pci) = (about.uuid.clone(), about.pci.clone());
    std::thread::spawn(move || {
        let health = mark::during_unwaited("NVML (starting)", Management::open)
            .and_then(|management| mark::during_unwaited("NVML (finding the card)", || management.health(&uuid, &pci)));
        let health: Box<dyn HealthSource> = match health {
            Ok(health) => Box::new(Marked(health)),
            Err(problem) => Box::new(NoHealth(problem.to_string())),
        };
        let _ = sender.send(health);
    });
    receiver
        .recv_timeout(MANAGEMENT_LIMIT)
        .unwrap_or_else(|_| Box::new(NoHealth(format!("NVML did not answer within {} s", MANAGEMENT_LIMIT.as_secs()))))
}

/// Notes each question to NVML while it is under way.
struct Marked<H>(H);

impl<H: HealthSource> HealthSource for Marked<H> {
    fn name(&self) -> String {
        self.0.name()
    }
    fn ecc(&self) -> Reading<EccCounters> {
        mark::during("NVML (error counters)", || self.0.ecc())
    }
    fn replaced(&self) -> Reading<Replaced> {
        mark::during("NVML (replaced rows)", || self.0.replaced())
    }
    fn watch_xids(&self) -> Reading<()> {
        mark::during("NVML (events)", || self.0.watch_xids())
    }
    fn xids(&self) -> Reading<Vec<u64>> {
        mark::during("NVML (events)", || self.0.xids())
    }
    fn processes(&self) -> Reading<Vec<GpuProcess>> {
        mark::during("NVML (processes)", || self.0.processes())
    }
}

impl Card for CudaCard {
    fn name(&self) -> String {
        format!("cuda:{}", self.about.ordinal)
    }

    fn open(&self) -> Result<Opened, DriverError> {
        let health = health_of(&self.about);
        let driver = CudaGpu::open(self.cuda, self.about.ordinal).map_err(|problem| match problem {
            CudaProblem::Failed(error) => error,
            CudaProblem::NoDevice { .. } | CudaProblem::NoSuchDevice { .. } => {
                DriverError::new(Call::Other("cuDeviceGet"), code::NO_DEVICE)
            }
            // Looked at before: the driver would have to change under our feet.
            _ => DriverError::new(Call::Other("cuDeviceGet"), code::NOT_SUPPORTED),
        })?;
        Ok(Opened { driver: Box::new(driver), health })
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::{Cause, Status};
    use super::super::{Level, Options, run};
    use super::*;
    use crate::gpu::fakes::in_child;
    use crate::gpu::kernels::Kernel;
    use crate::report::Silent;

    const HERE: &str = module_path!();
    /// Spread over the run, because a flip before the memory is written again is not seen.
    const FLIPS: &str = "flip=0xA00456:2@150,flip=0xA01456:2@197,flip=0xA02456:2@244,flip=0xA03456:2@291,\
                         flip=0xA04456:2@338,flip=0xA05456:2@385,flip=0xA06456:2@432,flip=0xA07456:2@479,flip=0xA08456:2@526";

    #[test]
    fn planted_faults_come_out_with_their_cause() {
        let cases: &[(&str, &str, Status, Option<Cause>)] = &[
            ("", "", Status::Pass, None),
            ("stuck=0x900123:0x10:0x10", "", Status::Fail, Some(Cause::StuckBit)),
            (FLIPS, "", Status::Fail, Some(Cause::FlippedBit)),
            ("alias=0x900000:0xC00000:0x1000", "", Status::Fail, Some(Cause::AliasedAddresses)),
            ("fail=cuLaunchKernel:54321@50", "", Status::Fail, Some(Cause::DriverError)),
            ("fail=cuMemFree:719@2", "", Status::Fail, Some(Cause::DriverError)),
            ("skip=tare_verify", "", Status::Fail, Some(Cause::Kernels)),
            ("leak=4MiB@100", "", Status::Fail, Some(Cause::Leak)),
            // A list of processes without this one says nothing of who took the memory.
            ("leak=4MiB@100", "hide-processes", Status::Pass, None),
            ("take=4MiB@100", "hide-processes", Status::Pass, None),
            ("weak=0x900123:0x10:3", "", Status::Fail, Some(Cause::FlippedBit)),
            ("weak=0x200123:0x10:3", "", Status::Fail, Some(Cause::FlippedBit)),
            ("", "ecc=volatile.uncorrected:1@30", Status::Fail, Some(Cause::EccErrors)),
            ("", "remap=0:1:1:0@30", Status::Fail, Some(Cause::RowsRemapped)),
            ("", "xid=63@30", Status::Fail, Some(Cause::Xid)),
            ("oom=2MiB", "", Status::NotTested, Some(Cause::OutOfMemory)),
            ("", "process=4000000:1MiB", Status::NotTested, Some(Cause::Busy)),
            ("fail=cuDevicePrimaryCtxRetain:100", "", Status::NotTested, Some(Cause::NoDevice)),
        ];
        for (cuda, nvml, status, cause) in cases {
            let variables = [("TARE_FAKE_CUDA", *cuda), ("TARE_FAKE_NVML", *nvml), ("TARE_FAKE_DEVICES", "32MiB")];
            in_child(HERE, "planted_faults_come_out_with_their_cause", &variables, || {
                let cards = CudaCard::find(None).expect("the fake driver");
                let cards: Vec<Box<dyn Card>> = cards.into_iter().map(|card| Box::new(card) as Box<dyn Card>).collect();
                let report = run(&cards, &Options::new(Level::Quick), &Silent);
                let device = &report.devices[0];
                assert_eq!((device.status, device.cause), (*status, *cause), "{}\n{:#?}", device.summary, device.findings);
                if *nvml == "hide-processes" {
                    let books = device.steps.iter().find(|step| step.name == "books").expect("the step is there");
                    let told = books.detail.clone().unwrap_or_default();
                    assert_eq!(books.status, Status::NotTested, "{told}");
                    assert!(told.contains("the driver's list of processes does not name this one"), "{told}");
                }
                if cuda.starts_with("weak") {
                    assert!(device.findings.iter().all(|finding| finding.cause == Cause::FlippedBit), "{:#?}", device.findings);
                }
            });
        }
    }

    /// From the start, and from some launch in the middle of the test on.
    #[test]
    fn a_kernel_that_does_nothing_never_passes() {
        for kernel in Kernel::ALL {
            for at in ["", "@180", "@300"] {
                let fault = format!("skip={}{at}", kernel.name());
                let variables = [("TARE_FAKE_CUDA", fault.as_str()), ("TARE_FAKE_DEVICES", "24MiB")];
                in_child(HERE, "a_kernel_that_does_nothing_never_passes", &variables, || {
                    let cards = CudaCard::find(None).expect("the fake driver");
                    let cards: Vec<Box<dyn Card>> = cards.into_iter().map(|card| Box::new(card) as Box<dyn Card>).collect();
                    let report = run(&cards, &Options::new(Level::Quick), &Silent);
                    let device = &report.devices[0];
                    assert_eq!((device.status, device.cause), (Status::Fail, Some(Cause::Kernels)), "{fault}: {}", report.text());
                });
            }
        }
    }

    #[test]
    fn cards_that_are_too_old_are_left_out() {
        let devices = [("TARE_FAKE_DEVICES", "32MiB;cc=3.5,32MiB;cc=5.2")];
        in_child(HERE, "cards_that_are_too_old_are_left_out", &devices, || {
            let names: Vec<String> = CudaCard::find(None).expect("cards").iter().map(Card::name).collect();
            assert_eq!(names, ["cuda:1"]);
            assert_eq!(CudaCard::find(Some(0)).expect_err("too old"), CudaProblem::DeviceTooOld { ordinal: 0, found: (3, 5) });
            assert_eq!(CudaCard::find(Some(2)).expect_err("none"), CudaProblem::NoSuchDevice { ordinal: 2, count: 2 });
        });
    }
}
