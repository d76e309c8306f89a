//! The little of ELF that is needed here: what a file asks of the loader, and (for relocated interpreters) another search path for it.
//!
//! Reading goes through the `object` crate. Writing is two careful edits, because no crate for it is widely used yet:
//!
//! 1. **In place**, when the new search path is no longer than the old one and no other string of `.dynstr` shares
//!    bytes with it (linkers store one string as the tail of another).
//! 2. **By a new segment** otherwise: a copy of `.dynstr` with the new string goes to the end of the file, and a
//!    `PT_NOTE` entry of the program header table is turned into the `PT_LOAD` that maps it. The table itself does not
//!    move, so no kernel and no loader computes a wrong address for it. A missing `DT_RUNPATH` takes one of the spare
//!    `DT_NULL` slots that the GNU linker leaves.
//!
//! Source: System V ABI (gABI), chapters 4 and 5; `ld.so(8)` for the meaning of DT_RPATH, DT_RUNPATH and `$ORIGIN`.

use object::elf::{self, FileHeader64};
use object::read::elf::{Dyn, FileHeader, ProgramHeader, SectionHeader, Sym};
use object::{Endian, Endianness, ReadCache, ReadRef};

type Header = FileHeader64<Endianness>;

/// Which of the two dynamic tags carries a search path. DT_RPATH is searched before LD_LIBRARY_PATH, DT_RUNPATH after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PathTag {
    /// DT_RPATH (15).
    Rpath,
    /// DT_RUNPATH (29).
    Runpath,
}

impl PathTag {
    const fn tag(self) -> u64 {
        match self {
            PathTag::Rpath => elf::DT_RPATH as u64,
            PathTag::Runpath => elf::DT_RUNPATH as u64,
        }
    }
}

/// What one ELF file asks of the loader.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ElfInfo {
    /// `e_machine`, for instance 62 for x86-64.
    pub machine: u16,
    /// The loader of an executable (PT_INTERP).
    pub interpreter: Option<String>,
    /// DT_NEEDED in file order.
    pub needed: Vec<String>,
    /// DT_SONAME.
    pub soname: Option<String>,
    /// DT_RPATH and DT_RUNPATH as stored, in file order.
    pub search_paths: Vec<(PathTag, String)>,
    /// The highest `GLIBC_x.y` version that the file needs of the C library.
    pub glibc: Option<(u32, u32)>,
    /// Symbol versions that the file needs of its libraries (`.gnu.version_r`).
    pub version_needs: Vec<VersionNeed>,
    /// Symbol versions that the file has (`.gnu.version_d`), the file's own base version included.
    pub version_defs: Vec<String>,
}

/// A symbol version that a file needs of a library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionNeed {
    /// The library, as in DT_NEEDED.
    pub file: String,
    /// The version, for instance `GLIBCXX_3.4.30`.
    pub version: String,
    /// The loader only warns where it is missing (VER_FLG_WEAK).
    pub weak: bool,
}

/// Whether `data` starts like an ELF file.
pub fn is_elf(data: &[u8]) -> bool {
    data.starts_with(b"\x7fELF")
}

/// Where the dynamic table and its strings lie.
struct Layout<'data> {
    header: &'data Header,
    endian: Endianness,
    /// File offset of the first dynamic entry (16 bytes each) and number of entries.
    dynamic: (usize, usize),
    /// DT_STRTAB (a virtual address), its file offset, DT_STRSZ.
    strings: (u64, usize, usize),
}

fn layout<'data, R: ReadRef<'data>>(data: R) -> Result<Option<Layout<'data>>, String> {
    let header = Header::parse(data).map_err(|error| format!("not a 64-bit ELF file: {error}"))?;
    let endian = header.endian().map_err(|error| error.to_string())?;
    let segments = header.program_headers(endian, data).map_err(|error| error.to_string())?;
    let Some(segment) = segments.iter().find(|segment| segment.p_type(endian) == elf::PT_DYNAMIC) else {
        return Ok(None);
    };
    let (offset, size) = segment.file_range(endian);
    let Some(entries) = segment.dynamic(endian, data).map_err(|error| error.to_string())? else { return Ok(None) };
    let (mut address, mut length) = (None, None);
    for entry in entries {
        match entry.tag32(endian) {
            Some(elf::DT_NULL) => break,
            Some(elf::DT_STRTAB) => address = Some(entry.d_val(endian)),
            Some(elf::DT_STRSZ) => length = Some(entry.d_val(endian)),
            _ => {}
        }
    }
    let (Some(address), Some(length)) = (address, length) else { return Err("the dynamic table names no string table".into()) };
    let string_offset = segments
        .iter()
        .filter(|segment| segment.p_type(endian) == elf::PT_LOAD)
        .find_map(|segment| {
            let start: u64 = segment.p_vaddr(endian);
            let inside = address.checked_sub(start)?;
            (inside < segment.p_filesz(endian)).then(|| segment.p_offset(endian).checked_add(inside))?
        })
        .ok_or("the string table lies in no loaded segment")?;
    let end = string_offset.checked_add(length).ok_or("the string table does not fit")?;
    if end > data.len().map_err(|()| "the length of the file is unknown".to_owned())? {
        return Err("the string table reaches past the end of the file".into());
    }
    Ok(Some(Layout {
        header,
        endian,
        dynamic: (offset as usize, (size / 16) as usize),
        strings: (address, string_offset as usize, length as usize),
    }))
}

impl Layout<'_> {
    fn string<'data, R: ReadRef<'data>>(&self, data: R, at: u64) -> Result<String, String> {
        let (start, length) = (self.strings.1 as u64, self.strings.2 as u64);
        if at >= length {
            return Err("a string lies outside the string table".into());
        }
        let bytes = data.read_bytes_at_until(start + at..start + length, 0).map_err(|()| "a string has no end".to_owned())?;
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    /// (index, tag, value) of every entry before the first DT_NULL.
    fn entries<'data, R: ReadRef<'data>>(&self, data: R) -> Vec<(usize, u64, u64)> {
        let mut out = Vec::new();
        for index in 0..self.dynamic.1 {
            let at = (self.dynamic.0 + index * 16) as u64;
            let (Some(tag), Some(value)) = (read_u64(data, at, self.endian), read_u64(data, at + 8, self.endian)) else { break };
            if tag == 0 {
                break;
            }
            out.push((index, tag, value));
        }
        out
    }
}

fn read_u64<'data, R: ReadRef<'data>>(data: R, at: u64, endian: Endianness) -> Option<u64> {
    let bytes: [u8; 8] = data.read_bytes_at(at, 8).ok()?.try_into().ok()?;
    Some(endian.read_u64_bytes(bytes))
}

fn write_u64(data: &mut [u8], at: usize, value: u64, endian: Endianness) {
    data[at..at + 8].copy_from_slice(&endian.write_u64_bytes(value));
}

fn write_u32(data: &mut [u8], at: usize, value: u32, endian: Endianness) {
    data[at..at + 4].copy_from_slice(&endian.write_u32_bytes(value));
}

/// Reads what an ELF file asks of the loader. A static file (no dynamic table) asks nothing.
///
/// # Errors
/// A text, when the file is no 64-bit ELF file or is damaged.
pub fn read(data: &[u8]) -> Result<ElfInfo, String> {
    read_from(data)
}

/// As [`read`], from a file of which only the needed parts are read: libraries of CUDA are hundreds of megabytes.
///
/// # Errors
/// As for [`read`]; the file cannot be opened.
pub fn read_file(path: &std::path::Path) -> Result<ElfInfo, String> {
    let file = crate::files::open(path).map_err(|error| error.to_string())?;
    read_from(&ReadCache::new(file))
}

/// Where sections of a name lie in a file: offset and length in bytes, in file order. `name` matches whole names.
///
/// # Errors
/// As for [`read_file`].
pub fn sections_of(path: &std::path::Path, name: &str) -> Result<Vec<(u64, u64)>, String> {
    let file = crate::files::open(path).map_err(|error| error.to_string())?;
    let cache = ReadCache::new(file);
    let header = Header::parse(&cache).map_err(|error| format!("not a 64-bit ELF file: {error}"))?;
    let endian = header.endian().map_err(|error| error.to_string())?;
    let sections = header.sections(endian, &cache).map_err(|error| error.to_string())?;
    Ok(sections
        .iter()
        .filter(|section| sections.section_name(endian, section).is_ok_and(|found| found == name.as_bytes()))
        .filter_map(|section| section.file_range(endian))
        .collect())
}

fn read_from<'data, R: ReadRef<'data>>(data: R) -> Result<ElfInfo, String> {
    let header = Header::parse(data).map_err(|error| format!("not a 64-bit ELF file: {error}"))?;
    let endian = header.endian().map_err(|error| error.to_string())?;
    let mut info = ElfInfo { machine: header.e_machine(endian), ..ElfInfo::default() };
    for segment in header.program_headers(endian, data).map_err(|error| error.to_string())? {
        if let Some(interpreter) = segment.interpreter(endian, data).map_err(|error| error.to_string())? {
            info.interpreter = Some(String::from_utf8_lossy(interpreter).into_owned());
        }
    }
    let Some(layout) = layout(data)? else { return Ok(info) };
    for (_, tag, value) in layout.entries(data) {
        match u32::try_from(tag) {
            Ok(elf::DT_NEEDED) => info.needed.push(layout.string(data, value)?),
            Ok(elf::DT_SONAME) => info.soname = Some(layout.string(data, value)?),
            Ok(elf::DT_RPATH) => info.search_paths.push((PathTag::Rpath, layout.string(data, value)?)),
            Ok(elf::DT_RUNPATH) => info.search_paths.push((PathTag::Runpath, layout.string(data, value)?)),
            _ => {}
        }
    }
    let sections = header.sections(endian, data).map_err(|error| error.to_string())?;
    for section in sections.iter() {
        if let Some((mut verneed, link)) = section.gnu_verneed(endian, data).map_err(|error| error.to_string())? {
            let strings = sections.strings(endian, data, link).map_err(|error| error.to_string())?;
            while let Some((need, mut names)) = verneed.next().map_err(|error| error.to_string())? {
                let file = need.file(endian, strings).map_err(|error| error.to_string())?;
                let file = String::from_utf8_lossy(file).into_owned();
                while let Some(name) = names.next().map_err(|error| error.to_string())? {
                    let weak = name.vna_flags.get(endian) & elf::VER_FLG_WEAK != 0;
                    let name = name.name(endian, strings).map_err(|error| error.to_string())?;
                    let version = String::from_utf8_lossy(name).into_owned();
                    info.glibc = info.glibc.max(glibc_version(&version));
                    info.version_needs.push(VersionNeed { file: file.clone(), version, weak });
                }
            }
        } else if let Some((mut verdef, link)) = section.gnu_verdef(endian, data).map_err(|error| error.to_string())? {
            let strings = sections.strings(endian, data, link).map_err(|error| error.to_string())?;
            while let Some((_, mut names)) = verdef.next().map_err(|error| error.to_string())? {
                // The first name is the version, those after it are its parents.
                if let Some(name) = names.next().map_err(|error| error.to_string())? {
                    let name = name.name(endian, strings).map_err(|error| error.to_string())?;
                    info.version_defs.push(String::from_utf8_lossy(name).into_owned());
                }
            }
        }
    }
    Ok(info)
}

/// `GLIBC_2.34` -> (2, 34); `GLIBC_2.2.5` -> (2, 2); `GLIBC_PRIVATE`, `GLIBCXX_3.4` and the like -> none.
fn glibc_version(name: &str) -> Option<(u32, u32)> {
    let mut parts = name.strip_prefix("GLIBC_")?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Offsets into `.dynstr` that symbols, dynamic entries and versions use.
///
/// # Errors
/// A text, when the file has no section headers, so that the users of the string table are not known.
fn string_users(data: &[u8], layout: &Layout<'_>) -> Result<Vec<u64>, String> {
    let endian = layout.endian;
    let mut users = Vec::new();
    for (_, tag, value) in layout.entries(data) {
        let strings = [
            elf::DT_NEEDED,
            elf::DT_SONAME,
            elf::DT_RPATH,
            elf::DT_RUNPATH,
            elf::DT_AUXILIARY,
            elf::DT_FILTER,
            elf::DT_CONFIG,
            elf::DT_DEPAUDIT,
            elf::DT_AUDIT,
        ];
        if u32::try_from(tag).is_ok_and(|tag| strings.contains(&tag)) {
            users.push(value);
        }
    }
    let sections = layout.header.sections(endian, data).map_err(|error| error.to_string())?;
    let mut symbols_seen = false;
    for section in sections.iter() {
        match section.sh_type(endian) {
            elf::SHT_DYNSYM => {
                symbols_seen = true;
                let symbols: &[elf::Sym64<Endianness>] =
                    section.data_as_array(endian, data).map_err(|_| "the dynamic symbol table is damaged".to_owned())?;
                users.extend(symbols.iter().map(|symbol| u64::from(symbol.st_name(endian))));
            }
            elf::SHT_GNU_VERNEED => {
                let Some((mut verneed, _)) = section.gnu_verneed(endian, data).map_err(|error| error.to_string())? else { continue };
                while let Some((need, mut names)) = verneed.next().map_err(|error| error.to_string())? {
                    users.push(u64::from(need.vn_file.get(endian)));
                    while let Some(name) = names.next().map_err(|error| error.to_string())? {
                        users.push(u64::from(name.vna_name.get(endian)));
                    }
                }
            }
            elf::SHT_GNU_VERDEF => {
                let Some((mut verdef, _)) = section.gnu_verdef(endian, data).map_err(|error| error.to_string())? else { continue };
                while let Some((_, mut names)) = verdef.next().map_err(|error| error.to_string())? {
                    while let Some(name) = names.next().map_err(|error| error.to_string())? {
                        users.push(u64::from(name.vda_name.get(endian)));
                    }
                }
            }
            _ => {}
        }
    }
    if !symbols_seen {
        return Err("the file has no section headers, so nothing tells who else uses its strings".into());
    }
    Ok(users)
}

/// Sets the search path of `tag`, adding the entry if the file has none of that tag. Returns the edited file; `data` itself when
/// it already has that search path.
///
/// # Errors
/// A text that says why the file cannot be edited: no dynamic table, no room, damaged.
pub fn set_search_path(data: &[u8], tag: PathTag, new: &str) -> Result<Vec<u8>, String> {
    let layout = layout(data)?.ok_or("the file is static")?;
    if new.as_bytes().contains(&0) {
        return Err("a search path cannot hold a NUL byte".into());
    }
    let entries = layout.entries(data);
    let existing = entries.iter().find(|(_, found, _)| *found == tag.tag()).copied();
    if let Some((_, _, value)) = existing {
        let old = layout.string(data, value)?;
        if old == new {
            return Ok(data.to_vec());
        }
        if new.len() <= old.len()
            && let Some(edited) = in_place(data, &layout, value, old.len(), new)?
        {
            return Ok(edited);
        }
    }
    by_segment(data, &layout, existing.map(|(index, ..)| index), entries.len(), tag, new)
}

/// The edit inside the old string's bytes; none when the string shares bytes with another.
fn in_place(data: &[u8], layout: &Layout<'_>, value: u64, old: usize, new: &str) -> Result<Option<Vec<u8>>, String> {
    let Ok(users) = string_users(data, layout) else { return Ok(None) };
    let value = usize::try_from(value).map_err(|error| error.to_string())?;
    let start = layout.strings.1 + value;
    // Part of a longer string, or another string is its tail.
    let starts_alone = value == 0 || data[start - 1] == 0;
    let tail_used = users.iter().any(|user| *user > value as u64 && *user <= (value + old) as u64);
    let also_used = users.iter().filter(|user| **user == value as u64).count() > 1;
    if !starts_alone || tail_used || also_used {
        return Ok(None);
    }
    let mut out = data.to_vec();
    out[start..start + old].fill(0);
    out[start..start + new.len()].copy_from_slice(new.as_bytes());
    Ok(Some(out))
}

/// The edit by a copy of the string table in a new segment.
fn by_segment(data: &[u8], layout: &Layout<'_>, existing: Option<usize>, used: usize, tag: PathTag, new: &str) -> Result<Vec<u8>, String> {
    const ENTRY: usize = 56; // sizeof(Elf64_Phdr)
    let endian = layout.endian;
    let segments = layout.header.program_headers(endian, data).map_err(|error| error.to_string())?;
    let loads: Vec<_> = segments.iter().filter(|segment| segment.p_type(endian) == elf::PT_LOAD).collect();
    let align = loads.iter().map(|segment| segment.p_align(endian)).max().unwrap_or(0).max(0x1000);
    let last = loads.iter().filter_map(|s| s.p_vaddr(endian).checked_add(s.p_memsz(endian))).max().unwrap_or(0);
    // Loadable segments are in ascending order of address: the new one must come after all of them.
    let last_load = segments.iter().rposition(|segment| segment.p_type(endian) == elf::PT_LOAD).unwrap_or(0);
    let spare = segments
        .iter()
        .enumerate()
        .position(|(index, segment)| index > last_load && segment.p_type(endian) == elf::PT_NOTE)
        .ok_or("the program header table has no note to give up for a new segment")?;
    if !align.is_power_of_two() || last > u64::MAX / 2 {
        return Err("the segments have impossible addresses".into());
    }
    let up = |value: u64| (value + align - 1) & !(align - 1);
    let (offset, address) = (up(data.len() as u64), up(last));

    let mut strings = data[layout.strings.1..layout.strings.1 + layout.strings.2].to_vec();
    let at = strings.len() as u64;
    strings.extend_from_slice(new.as_bytes());
    strings.push(0);

    let mut out = data.to_vec();
    out.resize(usize::try_from(offset).map_err(|error| error.to_string())?, 0);
    out.extend_from_slice(&strings);

    // The dynamic table.
    let slot = match existing {
        Some(index) => index,
        // One DT_NULL must stay behind the new entry.
        None if used + 1 < layout.dynamic.1 => used,
        None => return Err("the dynamic table has no spare entry for a search path".into()),
    };
    let entry = |index: usize| layout.dynamic.0 + index * 16;
    write_u64(&mut out, entry(slot), tag.tag(), endian);
    write_u64(&mut out, entry(slot) + 8, at, endian);
    for (index, found, _) in layout.entries(data) {
        match u32::try_from(found) {
            Ok(elf::DT_STRTAB) => write_u64(&mut out, entry(index) + 8, address, endian),
            Ok(elf::DT_STRSZ) => write_u64(&mut out, entry(index) + 8, strings.len() as u64, endian),
            _ => {}
        }
    }

    // The program header: p_type, p_flags, p_offset, p_vaddr, p_paddr, p_filesz, p_memsz, p_align.
    let header = usize::try_from(layout.header.e_phoff(endian)).map_err(|error| error.to_string())? + spare * ENTRY;
    write_u32(&mut out, header, elf::PT_LOAD, endian);
    write_u32(&mut out, header + 4, elf::PF_R, endian);
    let size = strings.len() as u64;
    for (field, value) in [offset, address, address, size, size, align].into_iter().enumerate() {
        write_u64(&mut out, header + 8 + field * 8, value, endian);
    }

    // The section header, for the tools that read those (`readelf`, `strip`): sh_addr 16, sh_offset 24, sh_size 32.
    let sections = layout.header.sections(endian, data).map_err(|error| error.to_string())?;
    let table = usize::try_from(layout.header.e_shoff(endian)).map_err(|error| error.to_string())?;
    for (index, section) in sections.iter().enumerate() {
        let loaded = u64::from(elf::SHF_ALLOC) & section.sh_flags(endian) != 0;
        if section.sh_type(endian) == elf::SHT_STRTAB && loaded && section.sh_addr(endian) == layout.strings.0 {
            let at = table + index * 64;
            write_u64(&mut out, at + 16, address, endian);
            write_u64(&mut out, at + 24, offset, endian);
            write_u64(&mut out, at + 32, size, endian);
        }
    }
    Ok(out)
}

/// Makes a path that was compiled into read-only data lead nowhere: every C string in `.rodata` that starts with `old` gets its
/// first bytes replaced by `/proc/0/`, a place that cannot exist. The length stays, and so do the string's last bytes, which another
/// string may share. Returns how many strings were changed. Paths shorter than 16 bytes are left alone.
pub fn blunt_embedded_path(data: &mut [u8], old: &str) -> Result<usize, String> {
    const NOWHERE: &[u8] = b"/proc/0/";
    if old.len() < 16 || !old.starts_with('/') {
        return Ok(0);
    }
    let ranges: Vec<(usize, usize)> = {
        let header = Header::parse(&*data).map_err(|error| error.to_string())?;
        let endian = header.endian().map_err(|error| error.to_string())?;
        let sections = header.sections(endian, &*data).map_err(|error| error.to_string())?;
        sections
            .iter()
            .filter(|section| sections.section_name(endian, section).is_ok_and(|name| name.starts_with(b".rodata")))
            .filter_map(|section| section.file_range(endian))
            .map(|(offset, size)| (offset as usize, offset.saturating_add(size) as usize))
            .collect()
    };
    let mut changed = 0;
    for (start, end) in ranges {
        let Some(bytes) = data.get_mut(start..end) else { return Err("a section reaches past the end of the file".into()) };
        let mut at = 0;
        while at < bytes.len() {
            let length = bytes[at..].iter().position(|byte| *byte == 0).unwrap_or(bytes.len() - at);
            let string = &mut bytes[at..at + length];
            if string.starts_with(old.as_bytes()) && matches!(string.get(old.len()), None | Some(b'/' | b':')) {
                string[..NOWHERE.len()].copy_from_slice(NOWHERE);
                changed += 1;
            }
            at += length + 1;
        }
    }
    Ok(changed)
}
