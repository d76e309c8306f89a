//! Reading files that may be something else than files.

use std::fs::Metadata;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// What something on disk is, for people: `a named pipe`.
pub(crate) fn kind(about: &Metadata) -> &'static str {
    let kind = about.file_type();
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a named pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
    }
    if kind.is_dir() {
        "a folder"
    } else if kind.is_symlink() {
        "a symbolic link"
    } else {
        "a file"
    }
}

/// Refuses what is no regular file. Links are not followed for `about` of the link itself.
///
/// # Errors
/// `InvalidInput`: "it is a named pipe and no regular file".
pub(crate) fn regular(about: &Metadata) -> Result<()> {
    if about.is_file() { Ok(()) } else { Err(Error::new(ErrorKind::InvalidInput, format!("it is {} and no regular file", kind(about)))) }
}

/// The bytes of a regular file or of what a link to one leads to. Never waits, as reading a pipe would, and never opens a device.
///
/// # Errors
/// As for [`std::fs::read`]; `InvalidInput` for anything but a regular file; `FileTooLarge` for more than `most` bytes.
pub(crate) fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    // Opening may have an effect where it is a device, so look first; and again afterwards, because it may have become another thing.
    regular(&std::fs::metadata(path)?)?;
    let mut options = std::fs::OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, rustix::fs::OFlags::NONBLOCK.bits() as i32);
    let file = options.open(path)?;
    regular(&file.metadata()?)?;
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("it is longer than {most} bytes")));
    }
    Ok(bytes)
}

/// Opens a regular file, or what a link to one leads to, for reading. Never waits, as opening a pipe would.
///
/// # Errors
/// As for [`std::fs::File::open`]; `InvalidInput` for anything but a regular file.
pub(crate) fn open(path: &Path) -> Result<std::fs::File> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        (rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY).bits() as i32,
    );
    let file = options.open(path)?;
    regular(&file.metadata()?)?;
    Ok(file)
}

/// Largest file of an environment that is read as a whole, in bytes: metadata, records, scripts.
pub(crate) const MOST: u64 = 256 << 20;

/// A regular file of at most [`MOST`] bytes as text.
///
/// # Errors
/// As for [`read`]; `InvalidData` where it is not UTF-8.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    String::from_utf8(read(path, MOST)?).map_err(|error| Error::new(ErrorKind::InvalidData, error))
}

/// As [`read`], and what the shell passes as a file, `/dev/stdin` and `<(…)`, is read too, for no more than `most` bytes.
///
/// # Errors
/// As for [`read`].
pub(crate) fn read_input(path: &Path, most: u64) -> Result<Vec<u8>> {
    let passed =
        path == Path::new("/dev/stdin") || ["/dev/fd", "/proc/self/fd"].iter().any(|folder| path.parent() == Some(Path::new(folder)));
    if !passed {
        return read(path, most);
    }
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("it is longer than {most} bytes")));
    }
    Ok(bytes)
}

/// Writes a file that somebody asked for, whole or not at all: beside it first, then under its name. A link is followed, a file that is there keeps its
/// mode, and what is no regular file (`/dev/stdout`, a pipe) is written to as it is.
///
/// # Errors
/// As for [`std::fs::write`]. Nothing of it is left then.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write as _;
    let about = std::fs::metadata(path).ok();
    if about.as_ref().is_some_and(|about| !about.is_file()) {
        return std::fs::write(path, bytes);
    }
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".tare-output-");
    // The umask has its say, as for every new file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = match builder.tempfile_in(folder) {
        // A file of one's own in a folder of somebody else.
        Err(error) if about.is_some() && matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) => {
            return std::fs::write(path, bytes);
        }
        made => made?,
    };
    file.write_all(bytes)?;
    if let Some(about) = about {
        file.as_file().set_permissions(about.permissions())?;
    }
    file.persist(&target).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_read_and_nothing_waits() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), b"\xff\0bytes").unwrap();
        std::os::unix::fs::symlink("file", at("link")).unwrap();
        assert_eq!(read(&at("link"), 7).unwrap(), b"\xff\0bytes");
        assert_eq!(read(&at("file"), 6).unwrap_err().kind(), ErrorKind::FileTooLarge);
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("device")).unwrap();
        for (name, what) in [("pipe", "a named pipe"), ("socket", "a socket"), ("device", "a device"), (".", "a folder")] {
            assert_eq!(read(&at(name), 10).unwrap_err().to_string(), format!("it is {what} and no regular file"));
            // A socket cannot be opened at all.
            let refused = open(&at(name)).unwrap_err();
            assert!(name == "socket" || refused.to_string() == format!("it is {what} and no regular file"), "{refused}");
        }
        assert_eq!(open(&at("link")).and_then(|file| file.metadata()).unwrap().len(), 7);
        assert_eq!(read_text(&at("file")).unwrap_err().kind(), ErrorKind::InvalidData);
        assert_eq!(read(&at("none"), 10).unwrap_err().kind(), ErrorKind::NotFound);
        // What the shell passes: an end of a pipe.
        let (reader, mut writer) = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut writer, b"passed").unwrap();
        drop(writer);
        let passed = format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
        assert_eq!(read_input(Path::new(&passed), 6).unwrap(), b"passed");
        assert_eq!(read_input(&at("device"), 10).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn outputs_are_whole_or_as_before() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write_whole(&at("new"), b"one").unwrap();
        std::fs::set_permissions(at("new"), std::fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("new", at("link")).unwrap();
        write_whole(&at("link"), b"two").unwrap();
        assert!(at("link").is_symlink());
        assert_eq!(std::fs::read(at("new")).unwrap(), b"two");
        assert_eq!(std::fs::metadata(at("new")).unwrap().permissions().mode() & 0o777, 0o640);
        write_whole(Path::new("/dev/null"), b"x").unwrap();
        assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
        assert!(write_whole(Path::new("/dev/full"), b"x").is_err());
        assert!(write_whole(&at("none/x"), b"x").is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
