//! Wheels for tests: deterministic, and as wrong as a test wants them.
//!
//! The archive is written here byte by byte (stored, no compression), because libraries refuse to write what hostile cases need. Uses nothing of the
//! crate, so that black-box tests can include it by `#[path]`.
#![allow(dead_code, reason = "each test crate uses a part of it")]

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// An entry of the archive.
#[derive(Clone, Debug)]
pub struct Member {
    pub name: Vec<u8>,
    pub data: Vec<u8>,
    /// The Unix mode with the kind of file: 0o100644.
    pub mode: u32,
    pub flags: u16,
    pub method: u16,
    /// The size that the headers claim, if that is a lie.
    pub claims: Option<u32>,
}

/// A member as it comes out of common tools.
pub fn member(name: impl AsRef<[u8]>, data: impl AsRef<[u8]>) -> Member {
    Member { name: name.as_ref().to_vec(), data: data.as_ref().to_vec(), mode: 0o100_644, flags: 0, method: 0, claims: None }
}

/// A wheel to be made.
#[derive(Clone, Debug)]
pub struct Wheel {
    pub name: String,
    pub version: String,
    pub tag: String,
    pub headers: Vec<String>,
    pub entry_points: String,
    pub files: Vec<Member>,
    /// Members that `RECORD` does not list.
    pub unlisted: Vec<Member>,
    pub format: String,
    pub dist_info: Option<String>,
    pub file_name: Option<String>,
    pub metadata: Option<String>,
    /// Changes the text of `RECORD`.
    pub record: Option<fn(String) -> String>,
}

impl Wheel {
    pub fn new(name: &str, version: &str) -> Self {
        Wheel {
            name: name.to_owned(),
            version: version.to_owned(),
            tag: "py3-none-any".to_owned(),
            headers: Vec::new(),
            entry_points: String::new(),
            files: Vec::new(),
            unlisted: Vec::new(),
            format: "1.0".to_owned(),
            dist_info: None,
            file_name: None,
            metadata: None,
            record: None,
        }
    }
    pub fn file(mut self, path: &str, text: impl AsRef<[u8]>) -> Self {
        self.files.push(member(path, text));
        self
    }
    pub fn program(mut self, path: &str, text: impl AsRef<[u8]>) -> Self {
        self.files.push(Member { mode: 0o100_755, ..member(path, text) });
        self
    }
    pub fn with(mut self, member: Member) -> Self {
        self.files.push(member);
        self
    }
    pub fn unlisted(mut self, member: Member) -> Self {
        self.unlisted.push(member);
        self
    }
    /// A line of `METADATA`, such as `Requires-Dist: a`.
    pub fn header(mut self, line: &str) -> Self {
        self.headers.push(line.to_owned());
        self
    }
    pub fn tag(mut self, tag: &str) -> Self {
        self.tag = tag.to_owned();
        self
    }
    pub fn entry_points(mut self, text: &str) -> Self {
        self.entry_points = text.to_owned();
        self
    }
    pub fn record(mut self, change: fn(String) -> String) -> Self {
        self.record = Some(change);
        self
    }

    fn stem(&self) -> String {
        format!("{}-{}", self.name.replace('-', "_"), self.version)
    }
    pub fn file_name(&self) -> String {
        self.file_name.clone().unwrap_or_else(|| format!("{}-{}.whl", self.stem(), self.tag))
    }

    /// The bytes of the archive.
    pub fn build(&self) -> Vec<u8> {
        let info = self.dist_info.clone().unwrap_or_else(|| format!("{}.dist-info", self.stem()));
        let mut members = self.files.clone();
        let metadata = self.metadata.clone().unwrap_or_else(|| {
            let mut text = format!("Metadata-Version: 2.1\nName: {}\nVersion: {}\n", self.name, self.version);
            for header in &self.headers {
                text += &format!("{header}\n");
            }
            text + "\nA wheel of a test.\n"
        });
        members.push(member(format!("{info}/METADATA"), metadata));
        let about = format!("Wheel-Version: {}\nGenerator: test\nRoot-Is-Purelib: true\nTag: {}\n", self.format, self.tag);
        members.push(member(format!("{info}/WHEEL"), about));
        if !self.entry_points.is_empty() {
            members.push(member(format!("{info}/entry_points.txt"), &self.entry_points));
        }
        let mut record = String::new();
        for member in members.iter().filter(|member| !member.name.ends_with(b"/")) {
            let name = String::from_utf8_lossy(&member.name);
            let name = if name.contains(',') { format!("\"{name}\"") } else { name.into_owned() };
            record += &format!("{name},sha256={},{}\n", base64(&Sha256::digest(&member.data)), member.data.len());
        }
        record += &format!("{info}/RECORD,,\n");
        if let Some(change) = self.record {
            record = change(record);
        }
        members.extend(self.unlisted.iter().cloned());
        members.push(member(format!("{info}/RECORD"), record));
        zip(&members)
    }

    /// Writes it into `folder` under its name.
    pub fn write(&self, folder: &Path) -> PathBuf {
        std::fs::create_dir_all(folder).expect("a folder");
        let path = folder.join(self.file_name());
        std::fs::write(&path, self.build()).expect("a wheel");
        path
    }
}

pub fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let word = (u32::from(chunk[0]) << 16) | (u32::from(*chunk.get(1).unwrap_or(&0)) << 8) | u32::from(*chunk.get(2).unwrap_or(&0));
        for index in 0..=chunk.len() {
            out.push(ALPHABET[(word >> (18 - 6 * index) & 63) as usize] as char);
        }
    }
    out
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    })
}

/// A zip archive of `members` in their order.
pub fn zip(members: &[Member]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut central = Vec::new();
    for member in members {
        let start = out.len() as u32;
        let mut common = Vec::new();
        // Version needed, flags, method, time and date (1980-01-01), CRC, sizes, length of the name, of the extra field.
        common.extend(20_u16.to_le_bytes());
        common.extend((member.flags | if member.name.is_ascii() { 0 } else { 1 << 11 }).to_le_bytes());
        common.extend(member.method.to_le_bytes());
        common.extend([0, 0, 0x21, 0]);
        common.extend(crc32(&member.data).to_le_bytes());
        common.extend((member.data.len() as u32).to_le_bytes());
        common.extend(member.claims.unwrap_or(member.data.len() as u32).to_le_bytes());
        common.extend((member.name.len() as u16).to_le_bytes());
        common.extend(0_u16.to_le_bytes());
        out.extend(b"PK\x03\x04");
        out.extend(&common);
        out.extend(&member.name);
        out.extend(&member.data);
        central.extend(b"PK\x01\x02");
        // Made by Unix.
        central.extend([20, 3]);
        central.extend(&common);
        // Comment, disk, internal attributes, external attributes, offset.
        central.extend([0; 6]);
        central.extend((member.mode << 16).to_le_bytes());
        central.extend(start.to_le_bytes());
        central.extend(&member.name);
    }
    let start = out.len() as u32;
    out.extend(&central);
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend((members.len() as u16).to_le_bytes());
    out.extend((members.len() as u16).to_le_bytes());
    out.extend((central.len() as u32).to_le_bytes());
    out.extend(start.to_le_bytes());
    out.extend([0, 0]);
    out
}
