//! The CUDA source and the PTX made from it, held against the reference implementation. No GPU is needed.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::host::{self, Kernel, Launch, Memory, Pattern, RESULT_RECORDS, RESULT_WORDS};

fn folder() -> PathBuf {
    // Not `env!("CARGO_MANIFEST_DIR")`: the modules are also compiled by other crates.
    let here = Path::new(file!());
    let here = if here.is_absolute() { here.to_owned() } else { Path::new(env!("CARGO_MANIFEST_DIR")).join(here) };
    here.parent().expect("a folder").to_owned()
}

/// A C++ compiler, or `None` after saying so. `TARE_TEST_CXX` names another one than `c++`.
fn compiler() -> Option<String> {
    let name = std::env::var("TARE_TEST_CXX").unwrap_or_else(|_| "c++".to_owned());
    match Command::new(&name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status() {
        Ok(status) if status.success() => Some(name),
        _ => {
            eprintln!("skipped: no C++ compiler `{name}`");
            None
        }
    }
}

/// Words from `ADDRESS` on.
#[derive(Clone, PartialEq)]
struct Image(Vec<u64>);

const ADDRESS: u64 = 0x1000_0000_0000;

impl Memory for Image {
    fn load(&mut self, address: u64) -> u64 {
        self.0[((address - ADDRESS) / 8) as usize]
    }
    fn store(&mut self, address: u64, value: u64) {
        self.0[((address - ADDRESS) / 8) as usize] = value;
    }
}

fn emulate(program: &Path, launch: &Launch, image: &Image) -> Image {
    let mut words: Vec<u64> = vec![launch.kernel.name().len() as u64];
    let mut name = launch.kernel.name().as_bytes().to_vec();
    name.resize(name.len().next_multiple_of(8), 0);
    words.extend(name.chunks(8).map(|part| u64::from_le_bytes(part.try_into().expect("eight bytes"))));
    words.extend([u64::from(launch.grid), u64::from(launch.block), launch.arguments().len() as u64]);
    words.extend(launch.arguments());
    words.extend([ADDRESS, image.0.len() as u64]);
    words.extend(&image.0);
    let input: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut child =
        Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the emulator starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    // It writes only after it has read everything.
    stdin.write_all(&input).expect("the emulator reads");
    drop(stdin);
    let output = child.wait_with_output().expect("the emulator ends");
    assert!(output.status.success(), "{launch:?}: {}", String::from_utf8_lossy(&output.stderr));
    Image(output.stdout.chunks_exact(8).map(|part| u64::from_le_bytes(part.try_into().expect("eight bytes"))).collect())
}

/// Mismatches are numbered as they come, and threads come in any order: the records are a set.
fn sort_records(image: &mut Image, result: u64) {
    let start = ((result - ADDRESS) / 8) as usize;
    let records = &mut image.0[start + RESULT_RECORDS as usize..start + RESULT_WORDS as usize];
    let mut sorted: Vec<[u64; 3]> = records.chunks_exact(3).map(|record| [record[0], record[1], record[2]]).collect();
    sorted.sort_unstable();
    for (place, record) in records.chunks_exact_mut(3).zip(sorted) {
        place.copy_from_slice(&record);
    }
}

#[test]
fn the_cuda_source_does_what_the_reference_does() {
    let Some(compiler) = compiler() else { return };
    let made = tempfile::tempdir().expect("a folder");
    let program = made.path().join("emulate");
    let compiled = Command::new(&compiler)
        .args(["-std=c++14", "-O1", "-Wno-parentheses", "-Wno-unknown-pragmas", "-o"])
        .args([program.as_path(), &folder().join("emulate.cpp")])
        .output()
        .expect("the compiler runs");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));

    let mut state = 7u64;
    let mut random = |below: u64| {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        host::mix(state) % below
    };
    let (mut mismatches, mut marks) = (0, 0);
    for round in 0..16 {
        for kernel in Kernel::ALL {
            // Lengths around whole tiles, with every alignment; sometimes nothing at all.
            let (grid, block) = (1 + random(5) as u32, 32 * (1 + random(3) as u32));
            let words = match random(4) {
                0 => random(6),
                1 => 8 * u64::from(block) * random(8) + random(3),
                _ => random(4000),
            };
            let base = ADDRESS + 8 * (RESULT_WORDS + 8 + random(2));
            let (result, sink) = (ADDRESS, ADDRESS + 8 * RESULT_WORDS);
            let origin = random(1 << 40);
            let patterns = Pattern::ALL.len() as u64 + 1;
            let (pattern, p0, p1) = (random(patterns), host::mix(random(99)), host::mix(random(3)));
            let (next, q0, q1) = (random(patterns), host::mix(random(99)), random(3));
            let modulus = 1 + random(40);
            let arguments: Vec<u64> = match kernel {
                Kernel::Fill => vec![base, words, origin, pattern, p0, p1],
                Kernel::Verify => vec![base, words, origin, pattern, p0, p1, result],
                Kernel::VerifyWrite => vec![base, words, origin, pattern, p0, p1, result, next, q0, q1, random(2)],
                Kernel::Copy => vec![base, base + 8 * (words + random(3)), words],
                Kernel::Read => vec![base, words, sink],
                Kernel::ModuloFill => vec![base, words, origin, modulus, random(modulus), p0, random(2)],
                Kernel::ModuloVerify => vec![base, words, origin, modulus, random(modulus), p0, result],
            };
            let mut image = Image((0..RESULT_WORDS + 16 + 2 * words + 4).map(|at| host::mix(at ^ round)).collect());
            image.0[..RESULT_WORDS as usize].fill(0);
            // Most words as expected, a few wrong in one bit or in all.
            if matches!(kernel, Kernel::Verify | Kernel::VerifyWrite) {
                host::run(&Launch::new(Kernel::Fill, 1, 32, &[base, words, origin, pattern, p0, p1]), &mut image);
            }
            if kernel == Kernel::ModuloVerify {
                let inside = Launch::new(Kernel::ModuloFill, 1, 32, &[base, words, origin, modulus, arguments[4], p0, 1]);
                host::run(&inside, &mut image);
            }
            // In half of the rounds there is nothing but the mark in what is read.
            let marked = kernel == Kernel::Read && round % 2 == 0 && words > 0;
            if marked {
                for at in 0..words {
                    image.store(base + 8 * at, 0);
                }
                image.store(base + 8 * random(words), host::READ_MARK);
                marks += 1;
            }
            for _ in 0..random(5) {
                if words > 0 && !marked {
                    let place = base + 8 * random(words);
                    let broken = image.load(place) ^ [1 << random(64), !0][random(2) as usize];
                    image.store(place, broken);
                }
            }
            let launch = Launch::new(kernel, grid, block, &arguments);
            let mut got = emulate(&program, &launch, &image);
            let mut expected = image.clone();
            host::run(&launch, &mut expected);
            mismatches += expected.0[0];
            sort_records(&mut got, result);
            sort_records(&mut expected, result);
            // What the sink holds means nothing, but for the mark.
            if !marked {
                got.store(sink, 0);
                expected.store(sink, 0);
            }
            assert!(got.0.len() == expected.0.len(), "{launch:?}");
            let wrong = (0..got.0.len()).find(|at| got.0[*at] != expected.0[*at]);
            assert_eq!(wrong, None, "round {round}: {launch:?}: first differing word, of {words} at word {}", (base - ADDRESS) / 8);
        }
    }
    assert!(mismatches > 20, "the planted errors were found: {mismatches}");
    assert!(marks > 4, "the mark was read: {marks}");
}

#[test]
fn the_source_knows_the_figures_of_the_reference() {
    let source = std::fs::read_to_string(folder().join("tare.cu")).expect("the source");
    for line in [
        format!("#define RECORDS {}ull", host::RECORDS),
        format!("#define HISTOGRAM_LIMIT (1ull << {})", host::HISTOGRAM_LIMIT.ilog2()),
        format!("#define RESULT_SET {}ull", host::RESULT_SET),
        format!("if (body.sum == {:#X}ull)", host::READ_MARK).replace("0X", "0x"),
    ] {
        assert!(source.contains(&line), "no `{line}` in tare.cu");
    }
    let ptx = std::fs::read_to_string(folder().join("tare.ptx")).expect("the PTX");
    assert!(ptx.contains("\n.version 7.7\n.target sm_52\n.address_size 64\n"), "another target than the driver is told");
    for kernel in Kernel::ALL {
        let entry = ptx.find(&format!(".visible .entry {}(", kernel.name())).expect("an entry for each kernel");
        let parameters = ptx[entry..].split(')').next().expect("parameters").matches(".param .u64").count();
        assert_eq!(parameters, kernel.arguments().len(), "{}", kernel.name());
    }
}

#[test]
fn the_committed_ptx_is_what_the_source_compiles_to() {
    let Some(library) = std::env::var_os("TARE_TEST_NVRTC") else {
        eprintln!("skipped: TARE_TEST_NVRTC does not name a libnvrtc.so of CUDA 11.7");
        return;
    };
    let ran = Command::new("python3").arg(folder().join("build.py")).arg("--check").arg(library).output().expect("python3 runs");
    assert!(ran.status.success(), "{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
}

/// `TARE_TEST_PTXAS`: one or more assemblers, separated by colons.
#[test]
fn assemblers_accept_the_ptx_for_every_architecture_they_know() {
    let Some(assemblers) = std::env::var_os("TARE_TEST_PTXAS") else {
        eprintln!("skipped: TARE_TEST_PTXAS names no ptxas");
        return;
    };
    for assembler in std::env::split_paths(&assemblers) {
        let help = Command::new(&assembler).arg("--help").output().expect("ptxas runs");
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        let mut architectures: Vec<&str> = help.split('\'').filter(|word| word.starts_with("sm_")).collect();
        architectures.sort_unstable();
        architectures.dedup();
        // Code for an architecture can only be made from PTX of the same or an older one.
        let number = |name: &str| name[3..].trim_end_matches(char::is_alphabetic).parse::<u32>().expect("a number");
        architectures.retain(|name| number(name) >= 52);
        assert!(architectures.len() > 5, "{}: {architectures:?}", assembler.display());
        for architecture in &architectures {
            let ran = Command::new(&assembler)
                .args(["-arch", architecture, "-o", "/dev/null"])
                .arg(folder().join("tare.ptx"))
                .output()
                .expect("ptxas runs");
            assert!(ran.status.success(), "{architecture}: {}", String::from_utf8_lossy(&ran.stderr));
        }
        eprintln!("{}: {}", assembler.display(), architectures.join(" "));
    }
}
