//! Memory of every card as the driver counts it, beside what caching allocators inside processes say of their part.
//!
//! Only the process itself can tell how much of its memory is in tensors and how much is merely cached. One that wants to be seen
//! writes a small file ([`Offer`]) into [`offers_folder`]; `docs/gpu-top.md` has the lines for torch. What is not offered is
//! shown as unknown, never guessed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::human;
use super::info::NvmlView;
use super::memtest::health::GpuProcess;
use super::nvml::{Asked, NvmlDevice, Utilisation};

/// Files larger than this are no offer.
const LARGEST_OFFER: u64 = 64 << 10;
/// An offer that was not renewed for so many seconds is shown with its age.
const STALE_SECONDS: u64 = 10;

/// What an allocator inside a process says: the contents of `PID.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The process, by its number in its own view.
    pub pid: u32,
    /// UUID of the card (`GPU-…`, or without `GPU-`).
    pub device: String,
    /// Bytes in use, `torch.cuda.memory_allocated()`.
    pub allocated_bytes: u64,
    /// Bytes taken from the driver, `torch.cuda.memory_reserved()`.
    pub reserved_bytes: u64,
    /// What the process calls itself.
    #[serde(default)]
    pub name: Option<String>,
    /// Seconds since the file was written.
    #[serde(skip_deserializing)]
    pub age_seconds: u64,
}

/// Where offers are: `$TARE_GPU_OFFERS`, else `$XDG_RUNTIME_DIR/tare/gpu`, else `/tmp/tare-UID/gpu`.
pub fn offers_folder() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("TARE_GPU_OFFERS")
        .or_else(|| set("XDG_RUNTIME_DIR").map(|folder| folder.join("tare/gpu")))
        .unwrap_or_else(|| PathBuf::from(format!("/tmp/tare-{}/gpu", rustix::process::getuid().as_raw())))
}

/// Offers of processes that are alive. What cannot be read is no offer: it is another process's file, not the user's input.
pub fn offers(folder: &Path) -> Vec<Offer> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten().take(4096) {
        let path = entry.path();
        let Some(pid) = path.file_stem().and_then(|name| name.to_str()).and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(about) = std::fs::metadata(&path) else { continue };
        if path.extension().is_none_or(|end| end != "json") || !about.is_file() || about.len() > LARGEST_OFFER {
            continue;
        }
        let offer = std::fs::read_to_string(&path).ok().and_then(|text| serde_json::from_str::<Offer>(&text).ok());
        let alive = Path::new("/proc").join(pid.to_string()).is_dir();
        if let Some(mut offer) = offer.filter(|offer| offer.pid == pid && alive) {
            offer.age_seconds = about.modified().ok().and_then(|time| time.elapsed().ok()).map_or(0, |age| age.as_secs());
            offer.name = offer.name.map(|name| name.chars().filter(|c| !c.is_control()).take(60).collect());
            found.push(offer);
        }
    }
    found.sort_by_key(|offer| offer.pid);
    found
}

/// One process on a card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TopProcess {
    /// As the driver numbers it; `None` for an allocator whose process the driver does not list by the same number.
    pub driver_pid: Option<u32>,
    /// In this process's view, where that is known.
    pub pid: Option<u32>,
    pub name: Option<String>,
    /// Bytes on the card, as the driver counts them: allocator, context and everything else.
    pub driver_bytes: Option<u64>,
    /// What its allocator offers.
    pub allocator: Option<Offer>,
}

/// One card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TopCard {
    /// NVML's number.
    pub index: u32,
    pub name: String,
    pub uuid: Option<String>,
    pub total_bytes: Option<u64>,
    pub used_bytes: Option<u64>,
    pub free_bytes: Option<u64>,
    pub utilisation: Option<Utilisation>,
    /// Celsius.
    pub temperature: Option<u32>,
    /// Milliwatts.
    pub power: Option<u32>,
    pub processes: Vec<TopProcess>,
    /// Why processes are not listed.
    pub processes_problem: Option<String>,
}

/// One look at all cards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Top {
    pub driver: Option<String>,
    /// Process numbers of the driver are the host's: this is a container.
    pub host_pids: bool,
    pub cards: Vec<TopCard>,
    /// Why there are no cards.
    pub problem: Option<String>,
}

/// Brings together what the driver and the allocators say.
pub fn combine(view: &NvmlView, offers: &[Offer], host_pids: bool) -> Top {
    let cards = view.devices.iter().filter_map(|device| device.value().map(|device| card(device, offers, host_pids))).collect();
    Top { driver: view.driver.clone(), host_pids, cards, problem: view.problem.clone() }
}

fn card(device: &NvmlDevice, offers: &[Offer], host_pids: bool) -> TopCard {
    let uuid = device.uuid.value().cloned();
    let same_card =
        |offer: &&Offer| uuid.as_ref().is_some_and(|uuid| uuid.trim_start_matches("GPU-") == offer.device.trim_start_matches("GPU-"));
    let mut here: BTreeMap<u32, &Offer> = offers.iter().filter(same_card).map(|offer| (offer.pid, offer)).collect();
    let mut processes = Vec::new();
    let mut processes_problem = None;
    match &device.processes {
        Asked::Value(all) => {
            for GpuProcess { pid, name, bytes, .. } in all {
                // In a container the numbers of the two sides are of different views and must not be compared.
                let offer = if host_pids { None } else { here.remove(pid) };
                processes.push(TopProcess {
                    driver_pid: Some(*pid),
                    pid: (!host_pids).then_some(*pid),
                    name: offer.and_then(|offer| offer.name.clone()).or_else(|| name.clone()),
                    driver_bytes: *bytes,
                    allocator: offer.cloned(),
                });
            }
        }
        Asked::NotSupported => processes_problem = Some("not told".to_owned()),
        Asked::Problem(problem) => processes_problem = Some(problem.clone()),
    }
    processes.extend(here.into_values().map(|offer| TopProcess {
        driver_pid: None,
        pid: Some(offer.pid),
        name: offer.name.clone(),
        driver_bytes: None,
        allocator: Some(offer.clone()),
    }));
    // Who holds most comes first.
    processes.sort_by_key(|process| {
        std::cmp::Reverse(process.driver_bytes.or(process.allocator.as_ref().map(|offer| offer.reserved_bytes)).unwrap_or(0))
    });
    let memory = device.memory.value();
    TopCard {
        index: device.index,
        name: device.name.value().cloned().unwrap_or_else(|| "a card without a name".to_owned()),
        uuid,
        total_bytes: memory.map(|memory| memory.total),
        used_bytes: memory.map(|memory| memory.used + memory.reserved.unwrap_or(0)),
        free_bytes: memory.map(|memory| memory.free),
        utilisation: device.utilisation.value().copied(),
        temperature: device.temperature.value().copied(),
        power: device.power.value().copied(),
        processes,
        processes_problem,
    }
}

/// Lays rows out in columns; the second argument names those that are aligned to the right.
pub type Table = fn(&[Vec<String>], &[usize]) -> String;

/// A bar of `width` characters, filled to `part` of `whole`.
fn bar(part: u64, whole: u64, width: usize) -> String {
    let filled =
        if whole == 0 { 0 } else { ((part.min(whole) as u128 * width as u128 + u128::from(whole) / 2) / u128::from(whole)) as usize };
    format!("[{}{}]", "#".repeat(filled), ".".repeat(width - filled))
}

impl Top {
    /// The table. `width`: columns of the terminal.
    pub fn text(&self, width: usize, table: Table) -> String {
        let mut text = String::new();
        if self.cards.is_empty() {
            let why = self.problem.as_ref().map(|problem| format!(": {problem}")).unwrap_or_default();
            return format!("no NVIDIA GPU to look at{why}\n");
        }
        let mut unknown = 0;
        for card in &self.cards {
            let mut facts = Vec::new();
            facts.extend(card.utilisation.map(|utilisation| format!("busy {} %", utilisation.gpu)));
            facts.extend(card.temperature.map(|celsius| format!("{celsius} °C")));
            facts.extend(card.power.map(|milliwatts| format!("{} W", milliwatts / 1000)));
            text.push_str(&format!("GPU {}  {}  {}\n", card.index, card.name, facts.join(", ")).replace("  \n", "\n"));
            if let (Some(used), Some(total), Some(free)) = (card.used_bytes, card.total_bytes, card.free_bytes) {
                let figures = format!("{} of {} used, {} free", human(used), human(total), human(free));
                let room = width.saturating_sub(figures.len() + 6).clamp(10, 60);
                text.push_str(&format!("  {} {figures}\n", bar(used, total, room)));
            }
            if let Some(problem) = &card.processes_problem {
                text.push_str(&format!("  processes: {problem}\n"));
                continue;
            }
            if card.processes.is_empty() {
                text.push_str("  no processes\n");
                continue;
            }
            let mut rows = vec![
                [if self.host_pids { "host pid" } else { "pid" }, "process", "driver", "reserved", "allocated", "cached idle", ""]
                    .map(str::to_owned)
                    .to_vec(),
            ];
            for process in &card.processes {
                let pid = match (process.driver_pid, process.pid) {
                    (Some(pid), _) => pid.to_string(),
                    (None, Some(pid)) => format!("({pid} here)"),
                    (None, None) => "?".to_owned(),
                };
                let bytes = |value: Option<u64>| value.map_or_else(|| "?".to_owned(), human);
                let offer = process.allocator.as_ref();
                unknown += u64::from(offer.is_none());
                let late = offer.filter(|offer| offer.age_seconds > STALE_SECONDS).map(|offer| format!("{} s ago", offer.age_seconds));
                rows.push(vec![
                    pid,
                    process.name.clone().unwrap_or_else(|| "?".to_owned()),
                    bytes(process.driver_bytes),
                    bytes(offer.map(|offer| offer.reserved_bytes)),
                    bytes(offer.map(|offer| offer.allocated_bytes)),
                    bytes(offer.map(|offer| offer.reserved_bytes.saturating_sub(offer.allocated_bytes))),
                    late.unwrap_or_default(),
                ]);
            }
            for line in table(&rows, &[0, 2, 3, 4, 5]).lines() {
                text.push_str(&format!("  {line}\n"));
            }
        }
        if unknown > 0 {
            text.push_str(&format!(
                "? {unknown} process{} not say what its allocator holds\n",
                if unknown == 1 { " does" } else { "es do" }
            ));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::fakes::in_child;
    use crate::gpu::info::ask_nvml;

    const HERE: &str = module_path!();

    fn plain(rows: &[Vec<String>], _: &[usize]) -> String {
        rows.iter().map(|row| row.join(" | ") + "\n").collect()
    }

    #[test]
    fn what_allocators_offer_stands_beside_what_the_driver_counts() {
        let variables =
            [("TARE_FAKE_DEVICES", "64MiB;used=20MiB,32MiB"), ("TARE_FAKE_NVML", "process=4000000:12MiB,process=4000001:unavailable")];
        in_child(HERE, "what_allocators_offer_stands_beside_what_the_driver_counts", &variables, || {
            let view = ask_nvml();
            let offer = Offer {
                pid: 4_000_000,
                device: "fa4e0000-0000-0000-0000-000000001000".into(),
                allocated_bytes: 3 << 20,
                reserved_bytes: 8 << 20,
                name: Some("train".into()),
                age_seconds: 33,
            };
            // Whether a process has a name depends on whether the tests run in a container.
            let text = combine(&view, std::slice::from_ref(&offer), false).text(80, plain).replace("fake-4000001", "?");
            insta::assert_snapshot!(text, @r"
            GPU 0  Fake GPU 0  busy 3 %, 40 °C, 70 W
              [##########.....................] 20.00 MiB of 64.00 MiB used, 44.00 MiB free
              pid | process | driver | reserved | allocated | cached idle | 
              4000000 | train | 12.00 MiB | 8.00 MiB | 3.00 MiB | 5.00 MiB | 33 s ago
              4000001 | ? | ? | ? | ? | ? | 
            GPU 1  Fake GPU 1  busy 3 %, 41 °C, 70 W
              [.....................................] 0 B of 32.00 MiB used, 32.00 MiB free
              no processes
            ? 1 process does not say what its allocator holds
            ");
            // In a container the two numbers are of different views: nothing is matched.
            let top = combine(&view, &[offer], true);
            assert!(top.cards[0].processes.iter().all(|process| process.driver_pid.is_none() == process.allocator.is_some()));
            assert_eq!(top.cards[0].processes.len(), 3);
            assert!(top.text(80, plain).contains("(4000000 here) | train | ? | 8.00 MiB"));
        });
    }

    #[test]
    fn only_offers_of_living_processes_count() {
        let folder = tempfile::tempdir().unwrap();
        let own = std::process::id();
        let text = |pid: u32| format!(r#"{{"pid":{pid},"device":"GPU-1","allocated_bytes":1,"reserved_bytes":2,"more":[]}}"#);
        for (name, contents) in [
            (format!("{own}.json"), text(own)),
            (format!("{}.json", u32::MAX), text(u32::MAX)),
            ("1.json".to_owned(), text(2)),
            ("2.txt".to_owned(), text(2)),
            ("3.json".to_owned(), "not json".to_owned()),
        ] {
            std::fs::write(folder.path().join(name), contents).unwrap();
        }
        let found: Vec<u32> = offers(folder.path()).iter().map(|offer| offer.pid).collect();
        assert_eq!(found, [own]);
        assert_eq!(offers(&folder.path().join("none")), []);
    }
}
