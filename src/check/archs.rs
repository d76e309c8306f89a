//! For which GPUs the code in a library was made, read from the file.
//!
//! Two sources, which must agree in the end: the fat binaries themselves (section `.nv_fatbin`: a chain of containers, each with one entry for each
//! architecture; only the headers of a few dozen bytes are read), and the list of compile flags that torch keeps as a string in
//! `libtorch_python.so` (what `torch.cuda.get_arch_list()` returns).

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use serde::Serialize;

use crate::elf;

/// First word of a container (what `cuobjdump` and the CUDA runtime look for).
const CONTAINER: u32 = 0xBA55_ED50;
/// Kinds of entries.
const PTX: u16 = 1;
const CODE: u16 = 2;
/// No real library has more; a damaged one could send us round for ever.
const MOST_CONTAINERS: u64 = 1 << 20;

/// The GPU code in one library.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct FatBinaries {
    /// Number of containers: about one for each compiled file.
    pub containers: u64,
    /// Entries with machine code, by architecture (75 for `sm_75`).
    pub code: BTreeMap<u32, u64>,
    /// Entries with PTX, by architecture.
    pub ptx: BTreeMap<u32, u64>,
}

impl FatBinaries {
    /// Architectures that all of the library was compiled for. Some kernels come for special architectures on top of that, so what is in fewer than
    /// nine of ten containers does not count.
    pub fn whole(&self) -> Vec<u32> {
        Self::in_most(&self.code, self.containers)
    }

    /// The same for PTX.
    pub fn whole_ptx(&self) -> Vec<u32> {
        Self::in_most(&self.ptx, self.containers)
    }

    /// Architectures that only a part of the library was compiled for.
    pub fn partial(&self) -> Vec<u32> {
        let whole = self.whole();
        self.code.keys().copied().filter(|sm| !whole.contains(sm)).collect()
    }

    fn in_most(counts: &BTreeMap<u32, u64>, containers: u64) -> Vec<u32> {
        counts.iter().filter(|(_, count)| **count * 10 >= containers * 9).map(|(sm, _)| *sm).collect()
    }
}

/// Reads the headers of the fat binaries of a library. `None` if it has none.
///
/// # Errors
/// A text, when the file is damaged or no ELF file.
pub fn fat_binaries(path: &Path) -> Result<Option<FatBinaries>, String> {
    let sections = elf::sections_of(path, ".nv_fatbin")?;
    if sections.is_empty() {
        return Ok(None);
    }
    let mut file = crate::files::open(path).map_err(|error| error.to_string())?;
    let mut found = FatBinaries::default();
    for (offset, size) in sections {
        walk(&mut file, offset, offset.saturating_add(size), &mut found)?;
    }
    Ok(Some(found))
}

fn at<const N: usize>(file: &mut (impl Read + Seek), offset: u64) -> Result<[u8; N], String> {
    let mut bytes = [0u8; N];
    file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(&mut bytes)).map_err(|error| format!("at byte {offset}: {error}"))?;
    Ok(bytes)
}

fn u16_of(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_of(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_of(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_of(bytes, at)) | u64::from(u32_of(bytes, at + 4)) << 32
}

/// A container: magic (4 bytes), version (2), length of this header (2), length of what follows (8). An entry: kind (2), version (2), length of
/// this header (4), length of the payload (8), …, architecture (4, at byte 28).
fn walk(file: &mut (impl Read + Seek), start: u64, end: u64, found: &mut FatBinaries) -> Result<(), String> {
    let mut position = start;
    while position.saturating_add(16) <= end {
        let header: [u8; 16] = at(file, position)?;
        if u32_of(&header, 0) != CONTAINER {
            // Between containers there may be padding up to their alignment.
            if header[..8].iter().any(|byte| *byte != 0) {
                return Err(format!("byte {position} is neither a container nor padding"));
            }
            position += 8;
            continue;
        }
        found.containers += 1;
        if found.containers > MOST_CONTAINERS {
            return Err("there are more containers than any library has".into());
        }
        let mut entry = position + u64::from(u16_of(&header, 6));
        let container_end =
            entry.checked_add(u64_of(&header, 8)).filter(|last| *last <= end).ok_or("a container is longer than its section")?;
        let mut seen: Vec<(u16, u32)> = Vec::new();
        while entry.saturating_add(32) <= container_end {
            let header: [u8; 32] = at(file, entry)?;
            let (kind, architecture) = (u16_of(&header, 0), u32_of(&header, 28));
            let length = u64::from(u32_of(&header, 4)).checked_add(u64_of(&header, 8)).filter(|length| *length >= 32);
            // A container may have several entries of one architecture: it still counts once.
            if matches!(kind, PTX | CODE) && !seen.contains(&(kind, architecture)) {
                seen.push((kind, architecture));
                *if kind == PTX { &mut found.ptx } else { &mut found.code }.entry(architecture).or_insert(0) += 1;
            }
            entry = length.and_then(|length| entry.checked_add(length)).ok_or("an entry has an impossible length")?;
        }
        position = container_end;
    }
    Ok(())
}

/// Architectures of machine code, and of PTX.
pub type Flags = (Vec<u32>, Vec<u32>);

/// The list of compile flags that torch keeps as a string. `None` if there is no such string.
///
/// # Errors
/// A text, when the file cannot be read or is no ELF file.
pub fn flags(path: &Path) -> Result<Option<Flags>, String> {
    let mut file = crate::files::open(path).map_err(|error| error.to_string())?;
    for (offset, size) in elf::sections_of(path, ".rodata")? {
        // The strings of a library of torch are a few megabytes.
        let mut bytes = vec![0u8; usize::try_from(size.min(256 << 20)).unwrap_or(0)];
        file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(&mut bytes)).map_err(|error| error.to_string())?;
        let found = bytes
            .split(|byte| *byte == 0)
            .filter(|text| text.len() < 1024 && (text.starts_with(b"sm_") || text.starts_with(b"compute_")))
            .filter_map(|text| parse_flags(std::str::from_utf8(text).ok()?))
            .max_by_key(|(code, ptx)| code.len() + ptx.len());
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// `sm_75 sm_80 compute_80`; letters behind the number (`sm_90a`) are for one architecture only and do not count as it.
fn parse_flags(text: &str) -> Option<Flags> {
    let (mut code, mut ptx) = (Vec::new(), Vec::new());
    for word in text.split_ascii_whitespace() {
        let (list, number) = match word.strip_prefix("sm_") {
            Some(number) => (&mut code, number),
            None => (&mut ptx, word.strip_prefix("compute_")?),
        };
        let digits = number.trim_end_matches(['a', 'f']);
        let value: u32 = digits.parse().ok().filter(|value| (10..1000).contains(value))?;
        if digits.len() == number.len() {
            list.push(value);
        }
    }
    (!code.is_empty() || !ptx.is_empty()).then_some((code, ptx))
}

/// A `.nv_fatbin` section for tests: one container for each item, an entry for each (is PTX, architecture).
#[cfg(test)]
pub(crate) fn made_section(containers: &[&[(bool, u32)]]) -> Vec<u8> {
    let mut out = Vec::new();
    for entries in containers {
        let mut body = Vec::new();
        for (ptx, architecture) in *entries {
            let mut header = vec![0u8; 64];
            header[0] = if *ptx { 1 } else { 2 };
            header[2..4].copy_from_slice(&257u16.to_le_bytes());
            header[4..8].copy_from_slice(&64u32.to_le_bytes());
            header[8..16].copy_from_slice(&24u64.to_le_bytes());
            header[28..32].copy_from_slice(&architecture.to_le_bytes());
            body.extend(header);
            body.extend([0xab; 24]);
        }
        out.extend(CONTAINER.to_le_bytes());
        out.extend(1u16.to_le_bytes());
        out.extend(16u16.to_le_bytes());
        out.extend((body.len() as u64).to_le_bytes());
        out.extend(body);
        out.extend([0; 8]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_headers_are_walked_without_the_payload() {
        let bytes = made_section(&[
            &[(false, 75), (false, 80), (true, 80)],
            &[(false, 75), (false, 80), (false, 80)],
            &[(false, 75), (false, 80), (false, 90)],
        ]);
        let mut found = FatBinaries::default();
        walk(&mut std::io::Cursor::new(&bytes), 0, bytes.len() as u64, &mut found).unwrap();
        assert_eq!(found.containers, 3);
        assert_eq!((found.whole(), found.partial(), found.whole_ptx()), (vec![75, 80], vec![90], vec![]));
        assert_eq!(found.ptx, BTreeMap::from([(80, 1)]));
    }

    #[test]
    fn flags_are_what_torch_was_compiled_with() {
        assert_eq!(parse_flags("sm_75 sm_80 compute_80"), Some((vec![75, 80], vec![80])));
        assert_eq!(parse_flags("sm_90a sm_100f sm_120"), Some((vec![120], vec![])));
        for bad in ["sm_", "sm_x", "sm_75 is a card", "sm_99999", ""] {
            assert_eq!(parse_flags(bad), None, "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_section_makes_it_panic_or_run_for_ever(mut bytes in proptest::collection::vec(0u8..=255, 0..400), at in 0usize..400, value in 0u8..=255) {
            let _ = walk(&mut std::io::Cursor::new(&bytes), 0, bytes.len() as u64, &mut FatBinaries::default());
            bytes.splice(0..0, made_section(&[&[(false, 75), (true, 80)], &[(false, 75)]]));
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
            let _ = walk(&mut std::io::Cursor::new(&bytes), 0, bytes.len() as u64, &mut FatBinaries::default());
        }
    }
}
