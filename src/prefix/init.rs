//! `init`: a shell function `tare` in the start-up file of a shell, so that `tare activate` can change the shell.
//!
//! What is written is text alone: reading it starts no process. It stands between two marks; everything outside of them stays byte for byte.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::shell::Shell;
use crate::error::{Error, Result};

const BEGIN: &str = "# >>> tare initialize >>>";
const END: &str = "# <<< tare initialize <<<";
const ABOUT: &str = "# Written by `tare init`, taken out by `tare init --undo`; changes in here are lost.";
/// What stood here before, where taking out the block alone would not bring it back.
const NEW_FILE: &str = "# (The file was made for it.)";
const NEW_LINE: &str = "# (The line before it had no end.)";
/// How the names of unfinished files begin.
const TEMPORARY: &str = ".tare-init-";
/// No start-up file is anywhere near this long (bytes).
const LARGEST: u64 = 64 << 20;

/// How the shell function calls the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tool {
    /// By its name: it is on PATH.
    OnPath,
    /// By this path.
    At(PathBuf),
}

/// What happened to a start-up file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// The block was put in.
    Added,
    /// The block was there and is different now.
    Updated,
    /// The block was taken out.
    Removed,
    /// The file is as it was.
    Unchanged,
}

/// The outcome for one shell.
#[derive(Debug, Clone, Serialize)]
pub struct Initialized {
    /// Name of the shell.
    pub shell: &'static str,
    /// Its start-up file.
    pub file: PathBuf,
    /// What happened to it, or would happen.
    pub change: Change,
    /// The block that is in it, or would be; empty if it was taken out.
    pub block: String,
}

/// The start-up file that interactive shells of this kind read. `config`: the folder of configuration files (XDG_CONFIG_HOME).
///
/// # Errors
/// The shell has none that it reads by itself.
pub fn rc_file(shell: Shell, home: &Path, config: &Path, zdotdir: Option<&Path>) -> Result<PathBuf> {
    Ok(match shell {
        Shell::Bash => home.join(".bashrc"),
        Shell::Zsh => zdotdir.unwrap_or(home).join(".zshrc"),
        Shell::Fish => config.join("fish/conf.d/tare.fish"),
        Shell::PowerShell if cfg!(windows) => dirs::document_dir().unwrap_or_else(|| home.join("Documents")).join("PowerShell/profile.ps1"),
        Shell::PowerShell => config.join("powershell/profile.ps1"),
        Shell::Posix => {
            return Err(Error::usage("a POSIX shell has no start-up file of its own")
                .hint("activate by: eval \"$(tare shell-hook -n NAME)\"")
                .hint("shells that can be set up: bash, zsh, fish, powershell"));
        }
    })
}

/// The function `tare` for a shell: `activate` and `deactivate` change the shell, after a change of packages the active environment is activated anew, and
/// everything else goes to the program as it is.
pub fn function(shell: Shell, tool: &Tool) -> String {
    let path = match tool {
        Tool::OnPath => None,
        Tool::At(path) => Some(shell.quote(&path.to_string_lossy())),
    };
    let name = shell.name();
    match shell {
        Shell::Posix | Shell::Bash | Shell::Zsh => {
            let call = path.unwrap_or_else(|| "\\command tare".to_owned());
            // After `function` no alias of that name is expanded. A backslash keeps aliases out of the rest.
            let (head, local) =
                if shell == Shell::Posix { ("tare() {", "") } else { ("function tare {", "            \\local __tare_script\n") };
            let change = |words: &str| {
                format!(
                    "{local}            __tare_script=\"$({call} __hook {name} {words})\" || \\return\n            \\eval \"$__tare_script\"\n"
                )
            };
            let (change, again) = (change("\"$@\""), change("reactivate"));
            format!(
                "{head}\n    case \"${{1-}}\" in\n        activate | deactivate)\n{change}            ;;\n        install | update | remove | uninstall | sync)\n            {call} \"$@\" || \\return\n            case \"${{CONDA_SHLVL:-0}}\" in 0) \\return 0 ;; esac\n{again}            ;;\n        *) {call} \"$@\" ;;\n    esac\n}}\n"
            )
        }
        Shell::Fish => {
            let call = path.map_or_else(|| "command tare".to_owned(), |path| format!("command {path}"));
            let change = |words: &str| {
                format!(
                    "            set -l __tare_script ({call} __hook {name} {words})\n            or return\n            eval (string join \\n -- $__tare_script | string collect)\n"
                )
            };
            let (change, again) = (change("$argv"), change("reactivate"));
            format!(
                "function tare --description 'Reproducible environments'\n    switch \"$argv[1]\"\n        case activate deactivate\n{change}        case install update remove uninstall sync\n            {call} $argv\n            or return\n            if not set -q CONDA_SHLVL; or test \"$CONDA_SHLVL\" = 0\n                return 0\n            end\n{again}        case '*'\n            {call} $argv\n    end\nend\n"
            )
        }
        Shell::PowerShell => {
            let find = path.unwrap_or_else(|| {
                "(Get-Command -Name tare -CommandType Application -ErrorAction Stop | Select-Object -First 1).Source".to_owned()
            });
            let change = |words: &str| {
                format!(
                    "        $tareScript = & $tareProgram __hook {name} {words} | Out-String\n        if ($LASTEXITCODE -eq 0 -and $tareScript.Trim()) {{ Invoke-Expression -Command $tareScript }}\n"
                )
            };
            let (change, again) = (change("@args"), change("reactivate").replace("        ", "            "));
            format!(
                "function global:tare {{\n    $tareProgram = {find}\n    if ($args.Count -gt 0 -and $args[0] -in 'activate', 'deactivate') {{\n{change}    }} elseif ($MyInvocation.ExpectingInput) {{\n        $input | & $tareProgram @args\n    }} else {{\n        & $tareProgram @args\n        if ($LASTEXITCODE -eq 0 -and $args.Count -gt 0 -and $args[0] -in 'install', 'update', 'remove', 'uninstall', 'sync' -and ${{Env:CONDA_SHLVL}} -gt 0) {{\n{again}        }}\n    }}\n}}\n"
            )
        }
    }
}

/// Puts the function into the start-up file, or with `undo` takes it out. With `dry_run` the file stays as it is and the outcome says what would happen.
/// The file is replaced in one step, under a lock on its folder, and only if nobody else has changed it meanwhile; mode, owner, access lists, bytes outside
/// of the block, and a symbolic link that leads to it stay.
///
/// # Errors
/// The file is no regular file nor a link to one, cannot be read or written, is read-only, has other hard links, is no plain text, or has a begin without
/// an end.
pub fn initialize(shell: Shell, file: &Path, tool: &Tool, undo: bool, dry_run: bool) -> Result<Initialized> {
    let target = follow(file)?;
    let by_hand = |error: Error| error.hint(format!("to put it in by hand, see what it is: tare init {} --dry-run", shell.name()));
    read(&target, file)?;
    let folder = target.parent().unwrap_or(Path::new("."));
    if !undo && !dry_run {
        std::fs::create_dir_all(folder).map_err(|error| by_hand(Error::io("create the folder", folder, &error)))?;
    }
    let _held = (!dry_run).then(|| hold(folder)).flatten();
    for _ in 0..5 {
        let old = read(&target, file)?;
        let (initialized, new) = edited(shell, file, tool, undo, old.as_deref())?;
        if initialized.change == Change::Unchanged || dry_run {
            return Ok(initialized);
        }
        if old.is_some() {
            refuse_protected(&target, file).map_err(by_hand)?;
        }
        match replace(&target, old.as_deref(), new.as_deref()) {
            Ok(true) => return Ok(initialized),
            // Somebody else wrote it since it was read: once more, on what is there now.
            Ok(false) => {}
            Err(error) => {
                let busy = error.kind() == ErrorKind::ResourceBusy;
                let made = Error::io("write", file, &error);
                return Err(by_hand(if busy { made.because("it is mounted there by itself, so it cannot be replaced") } else { made }));
            }
        }
    }
    Err(Error::failure(format!("cannot change `{}`", file.display())).because("another program goes on changing it").hint("run this again"))
}

/// The start-up file; `None` if there is none. `file`: how it is named to people.
fn read(target: &Path, file: &Path) -> Result<Option<Vec<u8>>> {
    match crate::files::read(target, LARGEST) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let made = Error::io("read", file, &error);
            let through = if target == file { String::new() } else { format!(" (it leads to `{}`)", target.display()) };
            Err(match error.kind() {
                ErrorKind::InvalidInput => made.hint(format!("`{}` must be a regular file or a link to one{through}", file.display())),
                _ => made,
            })
        }
    }
}

/// Refuses a file that its owner protects from changes: replacing it would work, and is not meant.
fn refuse_protected(target: &Path, file: &Path) -> Result<()> {
    let refuse = |why: String| Err(Error::failure(format!("cannot change `{}`", file.display())).because(why));
    let about = std::fs::metadata(target).map_err(|error| Error::io("look at", file, &error))?;
    let shown = target.display();
    if about.permissions().readonly() {
        return refuse(format!("`{shown}` is read-only"))
            .map_err(|error: Error| error.hint(format!("if it may be changed: chmod u+w '{shown}'")));
    }
    #[cfg(unix)]
    {
        if let Err(error) = rustix::fs::access(target, rustix::fs::Access::WRITE_OK) {
            return refuse(format!("`{shown}` cannot be written: {}", std::io::Error::from(error)));
        }
        let links = std::os::unix::fs::MetadataExt::nlink(&about);
        if links > 1 {
            return refuse(format!("`{shown}` has {links} names (hard links), which a new file would cut apart"));
        }
    }
    Ok(())
}

/// Keeps other runs out of `folder` and removes what killed ones left there. `None` where that is not possible.
fn hold(folder: &Path) -> Option<std::fs::File> {
    let lock = std::fs::File::open(folder).ok()?;
    let started = std::time::Instant::now();
    loop {
        match lock.try_lock() {
            Ok(()) => break,
            Err(std::fs::TryLockError::WouldBlock) if started.elapsed().as_secs() < 10 => {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            // Whatever changes then is seen before the file is replaced.
            Err(_) => return None,
        }
    }
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && entry.file_name().to_str().is_some_and(|name| name.starts_with(TEMPORARY)) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    Some(lock)
}

/// What the file becomes, from what it is; `None`: it goes.
fn edited(shell: Shell, file: &Path, tool: &Tool, undo: bool, old: Option<&[u8]>) -> Result<(Initialized, Option<Vec<u8>>)> {
    let text = old.unwrap_or_default();
    let refuse = |why: String| Error::failure(format!("cannot change `{}`", file.display())).because(why);
    if text.starts_with(&[0xff, 0xfe]) || text.starts_with(&[0xfe, 0xff]) {
        return Err(refuse("it is UTF-16, and not the UTF-8 that shells expect".to_owned()).hint("save it as UTF-8 text"));
    }
    let found = blocks(text)
        .map_err(|(why, line)| refuse(format!("{why} (line {line})")).hint("take out the rest of the block, and run this again"))?;
    let mut new = Vec::with_capacity(text.len() + 2048);
    let mut block = String::new();
    let mut at = 0;
    let has = |range: &std::ops::Range<usize>, flag: &str| {
        text[range.clone()].split(|byte| *byte == b'\n').any(|line| line.trim_ascii_end() == flag.as_bytes())
    };
    for (nth, range) in found.iter().enumerate() {
        new.extend(&text[at..range.start]);
        if undo {
            // A line that had no end gets none again, if nothing has come after it.
            if has(range, NEW_LINE) && range.end == text.len() && new.ends_with(b"\n") {
                new.pop();
            }
        } else if nth == 0 {
            let flags: Vec<&str> = [NEW_FILE, NEW_LINE].into_iter().filter(|flag| has(range, flag)).collect();
            block = block_text(shell, tool, &flags);
            new.extend(block.as_bytes());
        }
        at = range.end;
    }
    new.extend(&text[at..]);
    if !undo && found.is_empty() {
        let mut flags = Vec::new();
        if old.is_none() {
            flags.push(NEW_FILE);
        }
        if !text.is_empty() && !text.ends_with(b"\n") {
            flags.push(NEW_LINE);
            new.push(b'\n');
        }
        block = block_text(shell, tool, &flags);
        new.extend(block.as_bytes());
    }
    let change = match (undo, found.is_empty()) {
        _ if new == text => Change::Unchanged,
        (true, _) => Change::Removed,
        (false, true) => Change::Added,
        (false, false) => Change::Updated,
    };
    let goes = undo && new.is_empty() && found.iter().any(|range| has(range, NEW_FILE));
    Ok((Initialized { shell: shell.name(), file: file.to_owned(), change, block }, (!goes).then_some(new)))
}

fn block_text(shell: Shell, tool: &Tool, flags: &[&str]) -> String {
    let mut text = format!("{BEGIN}\n{ABOUT}\n");
    for flag in flags {
        text.push_str(flag);
        text.push('\n');
    }
    text.push_str(&function(shell, tool));
    text.push_str(END);
    text.push('\n');
    text
}

/// Whether the start-up file has the block.
pub(crate) fn is_initialized(file: &Path) -> bool {
    crate::files::read(file, LARGEST).is_ok_and(|text| blocks(&text).is_ok_and(|found| !found.is_empty()))
}

/// Where the blocks are, whole lines each; or what is wrong, and in which line.
fn blocks(text: &[u8]) -> Result<Vec<std::ops::Range<usize>>, (&'static str, usize)> {
    let mut found = Vec::new();
    let mut open: Option<(usize, usize)> = None;
    let mut at = 0;
    for (nth, line) in text.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let shown = line.trim_ascii_end();
        if shown == BEGIN.as_bytes() {
            if open.is_some() {
                return Err(("a block of tare begins in it twice and does not end in between", nth + 1));
            }
            open = Some((at, nth + 1));
        } else if shown == END.as_bytes() {
            match open.take() {
                Some((start, _)) => found.push(start..at + line.len()),
                None => return Err(("a block of tare ends in it that does not begin", nth + 1)),
            }
        }
        at += line.len();
    }
    match open {
        Some((_, line)) => Err(("a block of tare begins in it and does not end", line)),
        None => Ok(found),
    }
}

/// The file that links at `path` lead to, which need not exist.
fn follow(path: &Path) -> Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..40 {
        match std::fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("/")).join(target),
            Err(_) => return Ok(path),
        }
    }
    Err(Error::failure(format!("cannot read `{}`", path.display())).because("its symbolic links lead in a circle"))
}

/// Replaces a file in one step, or with `None` removes it; mode, owner and extended attributes stay. `false`: it is no longer what it was (`old`).
fn replace(target: &Path, old: Option<&[u8]>, new: Option<&[u8]>) -> std::io::Result<bool> {
    let folder = target.parent().unwrap_or(Path::new("."));
    let same = || match (std::fs::read(target), old) {
        (Ok(now), Some(old)) => now == old,
        (Err(error), None) => error.kind() == ErrorKind::NotFound,
        _ => false,
    };
    let Some(text) = new else {
        if !same() {
            return Ok(false);
        }
        return std::fs::remove_file(target).map(|()| true);
    };
    let mut temporary = tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(folder)?;
    temporary.write_all(text)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        match target.metadata() {
            Ok(about) => {
                if let Ok(made) = temporary.as_file().metadata()
                    && (made.uid(), made.gid()) != (about.uid(), about.gid())
                {
                    std::os::unix::fs::fchown(temporary.as_file(), Some(about.uid()), Some(about.gid()))?;
                }
                temporary.as_file().set_permissions(about.permissions())?;
                copy_attributes(target, temporary.as_file())?;
            }
            // As a shell or an editor would make it.
            Err(_) => temporary.as_file().set_permissions(std::fs::Permissions::from_mode(0o666 & !umask()))?,
        }
    }
    temporary.as_file().sync_all()?;
    if !same() {
        return Ok(false);
    }
    temporary.persist(target).map_err(|error| error.error)?;
    crate::install::sync_folder(Some(folder));
    Ok(true)
}

/// Extended attributes, access lists among them. Those that only the system may set are left to it.
#[cfg(target_os = "linux")]
fn copy_attributes(from: &Path, to: &std::fs::File) -> std::io::Result<()> {
    use rustix::io::Errno;
    let mut names = vec![0_u8; 64 << 10];
    let length = match rustix::fs::listxattr(from, names.as_mut_slice()) {
        Ok(length) => length,
        Err(Errno::NOTSUP | Errno::NOSYS) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0_u8; 64 << 10];
        let length = rustix::fs::getxattr(from, name, value.as_mut_slice())?;
        let set = rustix::fs::fsetxattr(to, name, &value[..length], rustix::fs::XattrFlags::empty());
        if !name.starts_with(b"security.") && !name.starts_with(b"trusted.") {
            set?;
        }
    }
    Ok(())
}

#[cfg(all(unix, not(target_os = "linux")))]
fn copy_attributes(_: &Path, _: &std::fs::File) -> std::io::Result<()> {
    Ok(())
}

#[cfg(unix)]
fn umask() -> u32 {
    let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    rustix::process::umask(mask);
    mask.as_raw_mode()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(file: &Path, undo: bool) -> Change {
        initialize(Shell::Bash, file, &Tool::OnPath, undo, false).unwrap().change
    }

    #[test]
    fn everything_outside_of_the_block_stays_byte_for_byte() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rc");
        for old in [&b""[..], b"\n", b"alias x=y\n", b"no end", b"crlf\r\n", b"\xff\xfe no: \xff\n"[2..].as_ref(), b"\n\n# c\n\n"] {
            std::fs::write(&file, old).unwrap();
            assert_eq!((run(&file, false), run(&file, false)), (Change::Added, Change::Unchanged));
            let with = std::fs::read(&file).unwrap();
            assert!(with.starts_with(old) && with.ends_with(format!("{END}\n").as_bytes()));
            let other = initialize(Shell::Bash, &file, &Tool::At("/opt/it's/tare".into()), false, true).unwrap();
            assert_eq!(other.change, Change::Updated);
            assert!(other.block.contains(r"'/opt/it'\''s/tare' __hook bash"), "{}", other.block);
            assert_eq!(std::fs::read(&file).unwrap(), with, "a dry run writes nothing");
            assert_eq!((run(&file, true), run(&file, true)), (Change::Removed, Change::Unchanged));
            assert_eq!(std::fs::read(&file).unwrap(), old);
        }
        std::fs::remove_file(&file).unwrap();
        assert_eq!((run(&file, true), run(&file, false), run(&file, true)), (Change::Unchanged, Change::Added, Change::Removed));
        assert!(!file.exists(), "it was not there before");
    }

    #[test]
    fn what_comes_after_the_block_stays_a_line_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rc");
        std::fs::write(&file, "a").unwrap();
        run(&file, false);
        let mut text = std::fs::read_to_string(&file).unwrap();
        text.push_str("b\n");
        let twice = format!("{text}{BEGIN}\nold\n{END}\nc");
        std::fs::write(&file, twice).unwrap();
        assert_eq!(run(&file, false), Change::Updated);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), format!("{text}c"));
        run(&file, true);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "a\nb\nc");
    }

    #[test]
    fn a_damaged_block_is_left_to_a_person() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rc");
        for text in [format!("{BEGIN}\nx\n"), format!("{END}\n"), format!("{BEGIN}\n{BEGIN}\n{END}\n"), "\u{0}".to_owned()] {
            let bytes = if text == "\u{0}" { vec![0xff, 0xfe, b'a', 0] } else { text.into_bytes() };
            std::fs::write(&file, &bytes).unwrap();
            for undo in [false, true] {
                let error = initialize(Shell::Bash, &file, &Tool::OnPath, undo, false).unwrap_err();
                assert_eq!((error.exit_code(), error.hints().is_empty()), (1, false));
                assert!(bytes[0] == 0xff || error.causes()[0].ends_with(" 1)") || error.causes()[0].ends_with(" 2)"), "{error}");
            }
            assert_eq!(std::fs::read(&file).unwrap(), bytes);
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_and_modes_stay() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (file, link, dotfiles) = (folder.path().join("dotfiles/rc"), folder.path().join("rc"), folder.path().join("dotfiles"));
        std::fs::create_dir(&dotfiles).unwrap();
        std::os::unix::fs::symlink("dotfiles/rc", &link).unwrap();
        // Not there yet: made where the link points.
        assert_eq!(run(&link, false), Change::Added);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        std::fs::write(&file, "x\n").unwrap();
        assert_eq!((run(&link, false), run(&link, true)), (Change::Added, Change::Removed));
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o640);
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink("rc", &link).unwrap();
        assert!(initialize(Shell::Bash, &link, &Tool::OnPath, false, false).unwrap_err().to_string().contains("circle"));
        assert_eq!(std::fs::read_dir(&dotfiles).unwrap().count(), 1, "nothing temporary stays");
    }

    /// What is at a path: kind, mode, bytes.
    #[cfg(unix)]
    fn state(path: &Path) -> (std::fs::FileType, u32, Option<Vec<u8>>) {
        use std::os::unix::fs::PermissionsExt;
        let about = std::fs::symlink_metadata(path).unwrap();
        (about.file_type(), about.permissions().mode(), about.is_file().then(|| std::fs::read(path).unwrap()))
    }

    #[cfg(unix)]
    #[test]
    fn only_a_regular_file_or_a_link_to_one_is_changed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        std::os::unix::fs::symlink("/dev/null", at("device")).unwrap();
        std::os::unix::fs::symlink("pipe", at("to-pipe")).unwrap();
        for (name, what) in
            [("pipe", "named pipe"), ("socket", "socket"), ("folder", "folder"), ("device", "device"), ("to-pipe", "named pipe")]
        {
            let before = state(&at(name));
            for (undo, dry_run) in [(false, false), (true, false), (false, true)] {
                let error = initialize(Shell::Bash, &at(name), &Tool::OnPath, undo, dry_run).unwrap_err();
                assert!(error.causes()[0].contains(what), "{name}: {error:?}");
                assert!(error.hints()[0].contains("must be a regular file"), "{name}: {error:?}");
            }
            assert!(!is_initialized(&at(name)));
            assert_eq!(state(&at(name)), before, "{name}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn what_its_owner_protects_is_left_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (file, other) = (folder.path().join("rc"), folder.path().join("other"));
        std::fs::write(&file, "x\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o444)).unwrap();
        let before = state(&file);
        let error = initialize(Shell::Bash, &file, &Tool::OnPath, false, false).unwrap_err();
        assert!(error.causes()[0].contains("read-only") && error.hints()[0].contains("chmod u+w"), "{error:?}");
        // What it would be is shown all the same.
        assert_eq!(initialize(Shell::Bash, &file, &Tool::OnPath, false, true).unwrap().change, Change::Added);
        assert_eq!(run(&file, true), Change::Unchanged);
        assert_eq!(state(&file), before);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::hard_link(&file, &other).unwrap();
        let error = initialize(Shell::Bash, &file, &Tool::OnPath, false, false).unwrap_err();
        assert!(error.causes()[0].contains("2 names"), "{error:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn large_files_keep_their_bytes_and_absurd_ones_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rc");
        let old: Vec<u8> = (0..3_000_000_u32).map(|nth| (nth.wrapping_mul(2_654_435_761) >> 13) as u8).chain(*b"\r\nlast").collect();
        std::fs::write(&file, &old).unwrap();
        assert_eq!((run(&file, false), run(&file, true)), (Change::Added, Change::Removed));
        assert!(std::fs::read(&file).unwrap() == old);
        std::fs::File::options().write(true).open(&file).unwrap().set_len(LARGEST + 1).unwrap();
        let error = initialize(Shell::Bash, &file, &Tool::OnPath, false, false).unwrap_err();
        assert!(error.causes()[0].contains("longer than"), "{error:?}");
    }

    #[test]
    fn a_file_that_an_editor_saved_with_crlf_is_understood() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rc");
        std::fs::write(&file, "no end").unwrap();
        run(&file, false);
        let text = std::fs::read_to_string(&file).unwrap().replace('\n', "\r\n");
        std::fs::write(&file, text.replace("no end\r\n", "no end\n")).unwrap();
        assert_eq!(run(&file, true), Change::Removed);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "no end");
        // A file that was made for the block goes with it.
        std::fs::remove_file(&file).unwrap();
        run(&file, false);
        let text = std::fs::read_to_string(&file).unwrap().replace('\n', "\r\n");
        std::fs::write(&file, text).unwrap();
        assert_eq!(run(&file, true), Change::Removed);
        assert!(!file.exists());
    }

    #[test]
    fn many_at_once_write_one_block_and_what_others_write_stays() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rc");
        std::fs::write(&file, "first\n").unwrap();
        // What a killed run left.
        std::fs::write(folder.path().join(format!("{TEMPORARY}abcdef")), "half").unwrap();
        let changes: Vec<Change> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| run(&file, false))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(changes.iter().filter(|change| **change == Change::Added).count(), 1, "{changes:?}");
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.starts_with("first\n") && text.matches(BEGIN).count() == 1);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing temporary stays");
        // Written by somebody else between reading and replacing: seen, and not lost.
        assert!(!replace(&file, Some(b"first\n"), Some(b"mine\n")).unwrap());
        assert!(!replace(&file, None, Some(b"mine\n")).unwrap());
        assert!(!replace(&file, Some(b"first\n"), None).unwrap());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn extended_attributes_stay() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rc");
        std::fs::write(&file, "x\n").unwrap();
        if rustix::fs::setxattr(&file, "user.mine", b"value", rustix::fs::XattrFlags::empty()).is_err() {
            println!("skipped: the file system keeps no extended attributes");
            return;
        }
        run(&file, false);
        let mut value = [0; 16];
        let length = rustix::fs::getxattr(&file, "user.mine", &mut value).unwrap();
        assert_eq!(&value[..length], b"value");
    }
}
