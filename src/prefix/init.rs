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
///
/// # Errors
/// The file cannot be read or written, is no plain text, or has a begin without an end.
pub fn initialize(shell: Shell, file: &Path, tool: &Tool, undo: bool, dry_run: bool) -> Result<Initialized> {
    let target = follow(file)?;
    let by_hand = |error: Error| error.hint(format!("to put it in by hand, see what it is: tare init {} --dry-run", shell.name()));
    let old = match std::fs::read(&target) {
        Ok(bytes) => Some(bytes),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(by_hand(Error::io("read", file, &error))),
    };
    let text = old.as_deref().unwrap_or_default();
    if text.starts_with(&[0xff, 0xfe]) || text.starts_with(&[0xfe, 0xff]) {
        return Err(by_hand(
            Error::failure(format!("cannot change `{}`", file.display())).because("it is UTF-16, and not the UTF-8 that shells expect"),
        ));
    }
    let found = blocks(text).map_err(|why| {
        by_hand(
            Error::failure(format!("cannot change `{}`", file.display()))
                .because(why)
                .hint("take out the rest of the block, and run this again"),
        )
    })?;
    let mut new = Vec::with_capacity(text.len() + 2048);
    let mut block = String::new();
    let mut at = 0;
    for (nth, range) in found.iter().enumerate() {
        new.extend(&text[at..range.start]);
        let has = |flag: &str| text[range.clone()].split(|byte| *byte == b'\n').any(|line| line == flag.as_bytes());
        if undo {
            // A line that had no end gets none again, if nothing has come after it.
            if has(NEW_LINE) && range.end == text.len() && new.ends_with(b"\n") {
                new.pop();
            }
        } else if nth == 0 {
            let flags: Vec<&str> = [NEW_FILE, NEW_LINE].into_iter().filter(|flag| has(flag)).collect();
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
    if change != Change::Unchanged && !dry_run {
        let was_made = found.iter().any(|range| text[range.clone()].windows(NEW_FILE.len()).any(|part| part == NEW_FILE.as_bytes()));
        if undo && new.is_empty() && was_made {
            std::fs::remove_file(&target).map_err(|error| Error::io("remove", file, &error))?;
        } else {
            write(&target, &new).map_err(|error| by_hand(Error::io("write", file, &error)))?;
        }
    }
    Ok(Initialized { shell: shell.name(), file: file.to_owned(), change, block })
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
    std::fs::read(file).is_ok_and(|text| blocks(&text).is_ok_and(|found| !found.is_empty()))
}

/// Where the blocks are, whole lines each.
fn blocks(text: &[u8]) -> Result<Vec<std::ops::Range<usize>>, &'static str> {
    let mut found = Vec::new();
    let mut open = None;
    let mut at = 0;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let shown = line.trim_ascii_end();
        if shown == BEGIN.as_bytes() {
            if open.is_some() {
                return Err("a block of tare begins in it twice and does not end in between");
            }
            open = Some(at);
        } else if shown == END.as_bytes() {
            match open.take() {
                Some(start) => found.push(start..at + line.len()),
                None => return Err("a block of tare ends in it that does not begin"),
            }
        }
        at += line.len();
    }
    if open.is_some() { Err("a block of tare begins in it and does not end") } else { Ok(found) }
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

/// Replaces a file in one step; mode and owner stay.
fn write(target: &Path, text: &[u8]) -> std::io::Result<()> {
    let folder = target.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut temporary = tempfile::Builder::new().prefix(".tare-init-").tempfile_in(folder)?;
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
            }
            // As a shell or an editor would make it.
            Err(_) => temporary.as_file().set_permissions(std::fs::Permissions::from_mode(0o666 & !umask()))?,
        }
    }
    temporary.as_file().sync_all()?;
    temporary.persist(target).map_err(|error| error.error)?;
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
}
