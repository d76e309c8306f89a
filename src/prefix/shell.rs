//! Shells: their quoting, and the few statements that activation is made of.
//!
//! Every statement holds under `set -e`, `set -u`, `set -o pipefail`, `nounset` of zsh and strict mode of PowerShell, and looks at the shell that runs it rather
//! than at the process that wrote it: a script may be stored and run later and elsewhere.

use std::path::Path;
use std::str::FromStr;

use crate::error::{Error, Result};

/// A shell that scripts are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shell {
    /// sh, dash and other POSIX shells.
    Posix,
    /// bash.
    Bash,
    /// zsh.
    Zsh,
    /// fish.
    Fish,
    /// PowerShell, all versions.
    PowerShell,
}

impl FromStr for Shell {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text.trim_end_matches(".exe") {
            "sh" | "dash" | "ash" | "ksh" | "posix" => Shell::Posix,
            "bash" => Shell::Bash,
            "zsh" => Shell::Zsh,
            "fish" => Shell::Fish,
            "powershell" | "pwsh" => Shell::PowerShell,
            _ => {
                return Err(Error::usage(format!("`{text}` is no shell that scripts can be made for"))
                    .hint("one of posix, bash, zsh, fish, powershell"));
            }
        })
    }
}

impl Shell {
    /// The name that [`Shell::from_str`] takes.
    pub const fn name(self) -> &'static str {
        match self {
            Shell::Posix => "posix",
            Shell::Bash => "bash",
            Shell::Zsh => "zsh",
            Shell::Fish => "fish",
            Shell::PowerShell => "powershell",
        }
    }

    /// The shell of the user: SHELL, else a POSIX one.
    pub fn detect(env: impl Fn(&str) -> Option<String>) -> Self {
        let name = env("SHELL").and_then(|path| Path::new(&path).file_name().map(|name| name.to_string_lossy().into_owned()));
        name.and_then(|name| name.parse().ok()).unwrap_or(Shell::Posix)
    }

    /// The shell that started this process, where the system tells; else as [`Shell::detect`].
    pub fn calling(env: impl Fn(&str) -> Option<String>) -> Self {
        parent_name().and_then(|name| name.parse().ok()).unwrap_or_else(|| Shell::detect(env))
    }

    const fn is_posix(self) -> bool {
        matches!(self, Shell::Posix | Shell::Bash | Shell::Zsh)
    }

    /// The ending of scripts in `activate.d` that it can run.
    pub(super) fn extension(self) -> &'static str {
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => "sh",
            Shell::Fish => "fish",
            Shell::PowerShell => "ps1",
        }
    }

    /// Names that cannot be set in it: they are read-only or mean something else, and the attempt may end the script in the middle.
    pub(super) fn reserved(self) -> &'static [&'static str] {
        match self {
            Shell::Posix => &["PPID"],
            Shell::Bash => &["BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"],
            Shell::Zsh => &[
                "ARGC",
                "EGID",
                "EUID",
                "GID",
                "HISTCMD",
                "LINENO",
                "PPID",
                "TTYIDLE",
                "UID",
                "USERNAME",
                "ZSH_EVAL_CONTEXT",
                "ZSH_SUBSHELL",
                "argv",
                "path",
                "pipestatus",
                "status",
            ],
            Shell::Fish => &[
                "FISH_VERSION",
                "PWD",
                "SHLVL",
                "_",
                "argv",
                "fish_pid",
                "history",
                "hostname",
                "pipestatus",
                "status",
                "umask",
                "version",
            ],
            Shell::PowerShell => &[],
        }
    }

    /// `text` as a word that the shell takes as it is.
    pub(super) fn quote(self, text: &str) -> String {
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => format!("'{}'", text.replace('\'', r"'\''")),
            Shell::Fish => format!("'{}'", text.replace('\\', r"\\").replace('\'', r"\'")),
            // PowerShell ends a string at typographic quotes too, and doubling is how each is written.
            Shell::PowerShell => {
                let doubled: String = text
                    .chars()
                    .flat_map(|c| {
                        std::iter::repeat_n(c, if matches!(c, '\'' | '\u{2018}' | '\u{2019}' | '\u{201a}' | '\u{201b}') { 2 } else { 1 })
                    })
                    .collect();
                format!("'{doubled}'")
            }
        }
    }

    pub(super) fn set(self, name: &str, value: &str) -> String {
        let value = self.quote(value);
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => format!("export {name}={value}\n"),
            Shell::Fish => format!("set -gx {name} {value}\n"),
            Shell::PowerShell => format!("${{Env:{name}}} = {value}\n"),
        }
    }

    pub(super) fn unset(self, name: &str) -> String {
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => format!("unset {name}\n"),
            Shell::Fish => format!("set -eg {name}\n"),
            Shell::PowerShell => format!("Remove-Item -ErrorAction SilentlyContinue 'Env:{name}'\n"),
        }
    }

    /// Keeps the value of `name` in `backup`; if it has none, `backup` has none either.
    pub(super) fn save(self, name: &str, backup: &str) -> String {
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => {
                format!("if [ \"${{{name}+x}}\" ]; then export {backup}=\"${{{name}}}\"; else unset {backup}; fi\n")
            }
            // Quoted, a list that stands for a path is joined by `:` as it is for other programs. A universal variable shows again when the global one goes.
            Shell::Fish => format!("if set -qg {name}; set -gx {backup} \"${name}\"; else; set -eg {backup}; end\n"),
            Shell::PowerShell => format!(
                "if (Test-Path 'Env:{name}') {{ ${{Env:{backup}}} = ${{Env:{name}}} }} else {{ Remove-Item -ErrorAction SilentlyContinue 'Env:{backup}' }}\n"
            ),
        }
    }

    /// Gives `name` the value it had at [`Shell::save`], or none.
    pub(super) fn restore(self, name: &str, backup: &str) -> String {
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => {
                format!("if [ \"${{{backup}+x}}\" ]; then export {name}=\"${{{backup}}}\"; unset {backup}; else unset {name}; fi\n")
            }
            Shell::Fish => format!("if set -qg {backup}; set -gx {name} \"${backup}\"; set -eg {backup}; else; set -eg {name}; end\n"),
            Shell::PowerShell => format!(
                "if (Test-Path 'Env:{backup}') {{ ${{Env:{name}}} = ${{Env:{backup}}}; Remove-Item 'Env:{backup}' }} else {{ Remove-Item -ErrorAction SilentlyContinue 'Env:{name}' }}\n"
            ),
        }
    }

    /// Changes PATH as it is when the script runs: the first `old` becomes `new`, or goes. Without `old`, or where it is not on PATH, `new` goes in front.
    /// Everything else stays in its place, empty entries too.
    pub(super) fn change_path(self, old: Option<&str>, new: Option<&str>) -> String {
        let quoted = |folder: Option<&str>| self.quote(folder.unwrap_or_default());
        let mut text = String::new();
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => {
                text.push_str("__tare_path=\":${PATH-}:\"\nif [ -z \"${PATH-}\" ]; then __tare_path=:; fi\n");
                let put = match new {
                    Some(_) => format!("__tare_path=:{}\"$__tare_path\"", quoted(new)),
                    None => ":".to_owned(),
                };
                match old {
                    Some(_) => {
                        let between = new.map(|_| format!("{}:", quoted(new))).unwrap_or_default();
                        text.push_str(&format!(
                            "__tare_old={}\ncase \"$__tare_path\" in\n*\":$__tare_old:\"*) __tare_path=\"${{__tare_path%%\":$__tare_old:\"*}}\":{between}\"${{__tare_path#*\":$__tare_old:\"}}\" ;;\n*) {put} ;;\nesac\nunset __tare_old\n",
                            quoted(old)
                        ));
                    }
                    None => text.push_str(&format!("{put}\n")),
                }
                text.push_str("__tare_path=\"${__tare_path#:}\"\nexport PATH=\"${__tare_path%:}\"\nunset __tare_path\n");
            }
            Shell::Fish => {
                if old.is_some() {
                    text.push_str(&format!("set -l __tare_at (contains -i -- {} $PATH)\nif test -n \"$__tare_at\"\n", quoted(old)));
                    text.push_str(&match new {
                        Some(_) => format!("set PATH[$__tare_at] {}\nelse\nset -gx PATH {} $PATH\n", quoted(new), quoted(new)),
                        None => "set -e PATH[$__tare_at]\n".to_owned(),
                    });
                    text.push_str("end\n");
                } else {
                    text.push_str(&format!("set -gx PATH {} $PATH\n", quoted(new)));
                }
            }
            Shell::PowerShell => {
                text.push_str("$__tare_separator = [string][IO.Path]::PathSeparator\n");
                text.push_str("$__tare_path = $__tare_separator\nif (${Env:PATH}) { $__tare_path = $__tare_separator + ${Env:PATH} + $__tare_separator }\n");
                let put = match new {
                    Some(_) => format!("$__tare_path = $__tare_separator + {} + $__tare_path", quoted(new)),
                    None => String::new(),
                };
                match old {
                    Some(_) => {
                        let between = new.map(|_| format!(" + {} + $__tare_separator", quoted(new))).unwrap_or_default();
                        text.push_str(&format!(
                            "$__tare_old = $__tare_separator + {} + $__tare_separator\n$__tare_at = $__tare_path.IndexOf($__tare_old, [StringComparison]::Ordinal)\nif ($__tare_at -ge 0) {{ $__tare_path = $__tare_path.Substring(0, $__tare_at) + $__tare_separator{between} + $__tare_path.Substring($__tare_at + $__tare_old.Length) }} else {{ {put} }}\n",
                            quoted(old)
                        ));
                    }
                    None => text.push_str(&format!("{put}\n")),
                }
                text.push_str("${Env:PATH} = $__tare_path.Substring(1, [Math]::Max(0, $__tare_path.Length - 2))\n");
            }
        }
        text
    }

    /// Puts `folder` in front of PATH unless it is there already.
    pub(super) fn ensure_path(self, folder: &str) -> String {
        self.change_path(Some(folder), Some(folder))
    }

    /// Runs scripts in this shell, in order. They were written for a shell without `set -e` and `set -u`, and get one.
    pub(super) fn source(self, scripts: &[std::path::PathBuf]) -> String {
        if scripts.is_empty() {
            return String::new();
        }
        let mut text = String::new();
        if self.is_posix() {
            text.push_str(
                "__tare_flags=\ncase $- in *e*) __tare_flags=e; set +e ;; esac\ncase $- in *u*) __tare_flags=\"${__tare_flags}u\"; set +u ;; esac\n",
            );
        }
        for script in scripts {
            let script = self.quote(&script.to_string_lossy());
            // A change of the environment may have taken the file away meanwhile.
            text.push_str(&match self {
                Shell::Posix | Shell::Bash | Shell::Zsh => format!("if [ -f {script} ]; then . {script}; fi\n"),
                Shell::Fish => format!("if test -f {script}; source {script}; end\n"),
                Shell::PowerShell => format!("if (Test-Path -LiteralPath {script} -PathType Leaf) {{ . {script} }}\n"),
            });
        }
        if self.is_posix() {
            text.push_str("if [ -n \"${__tare_flags-}\" ]; then set -\"$__tare_flags\"; fi\nunset __tare_flags\n");
        }
        text
    }

    /// Makes `modifier` what stands before the prompt of an interactive shell, in place of CONDA_PROMPT_MODIFIER as it is now, and sets that. An empty one takes
    /// it away. `last`: no environment is active afterwards.
    pub(super) fn prompt(self, modifier: &str, last: bool) -> String {
        let mut text = String::new();
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => {
                let (old, new) = match self {
                    // In a prompt of zsh `%` is written `%%`.
                    Shell::Zsh => ("${CONDA_PROMPT_MODIFIER//\\%/%%}", modifier.replace('%', "%%")),
                    _ => ("${CONDA_PROMPT_MODIFIER}", modifier.to_owned()),
                };
                let new = self.quote(&new);
                text.push_str(&format!(
                    "case $- in\n*i*)\nif [ -n \"${{CONDA_PROMPT_MODIFIER-}}\" ]; then\n__tare_old=\"{old}\"\ncase \"${{PS1-}}\" in\n*\"$__tare_old\"*) PS1=\"${{PS1%%\"$__tare_old\"*}}${{PS1#*\"$__tare_old\"}}\" ;;\nesac\nunset __tare_old\nfi\n"
                ));
                if !modifier.is_empty() {
                    text.push_str(&format!("PS1={new}\"${{PS1-}}\"\n"));
                }
                text.push_str(";;\nesac\n");
            }
            // The prompt is a function: it is wrapped once, by whoever comes first, and the wrapper shows the variable.
            Shell::Fish if last => text.push_str(
                "if functions -q __tare_fish_prompt\nif functions fish_prompt | string match -q '*__tare_fish_prompt*'\nfunctions -e fish_prompt\nfunctions -c __tare_fish_prompt fish_prompt\nend\nfunctions -e __tare_fish_prompt __tare_return\nend\n",
            ),
            Shell::Fish if !modifier.is_empty() => text.push_str(
                "if status is-interactive; and functions -q fish_prompt; and not functions -q __tare_fish_prompt; and not functions -q __conda_add_prompt\nfunctions -c fish_prompt __tare_fish_prompt\nfunction __tare_return\nreturn $argv[1]\nend\nfunction fish_prompt\nset -l __tare_status $status\nset_color normal\nprintf '%s' \"$CONDA_PROMPT_MODIFIER\"\n__tare_return $__tare_status\n__tare_fish_prompt\nend\nend\n",
            ),
            Shell::PowerShell if last => text.push_str(
                "if (Test-Path Function:__tare_prompt) {\nCopy-Item -Path Function:__tare_prompt -Destination Function:prompt\nRemove-Item -Path Function:__tare_prompt\n}\n",
            ),
            Shell::PowerShell if !modifier.is_empty() => text.push_str(
                "if (-not (Test-Path Function:__tare_prompt) -and -not (Test-Path Function:CondaPromptBackup)) {\nfunction global:__tare_prompt { '' }\nif (Test-Path Function:prompt) { Copy-Item -Path Function:prompt -Destination Function:__tare_prompt }\nfunction global:prompt {\nif (${Env:CONDA_PROMPT_MODIFIER}) { Write-Host -NoNewline ${Env:CONDA_PROMPT_MODIFIER} }\n__tare_prompt\n}\n}\n",
            ),
            Shell::Fish | Shell::PowerShell => {}
        }
        text.push_str(&if last { self.unset("CONDA_PROMPT_MODIFIER") } else { self.set("CONDA_PROMPT_MODIFIER", modifier) });
        text
    }

    /// Makes the shell forget where it found commands; the last statement, which succeeds.
    pub(super) fn rehash(self) -> &'static str {
        match self {
            Shell::Posix | Shell::Bash | Shell::Zsh => "hash -r 2>/dev/null || :\n",
            Shell::Fish => "true\n",
            Shell::PowerShell => "",
        }
    }
}

/// The name of the program that started this one.
#[cfg(target_os = "linux")]
fn parent_name() -> Option<String> {
    let parent = rustix::process::getppid()?.as_raw_nonzero();
    // Not `comm`, which a process may change and which is cut to 15 bytes.
    let program = std::fs::read_link(format!("/proc/{parent}/exe")).ok()?;
    // busybox and the like are told by what they were called as; `sh` is often another shell in disguise.
    let called = std::fs::read(format!("/proc/{parent}/cmdline")).ok()?;
    let called = String::from_utf8_lossy(called.split(|byte| *byte == 0).next()?).trim_start_matches('-').to_owned();
    let base = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    if base(Path::new(&called)).as_deref() == Some("sh") { Some("sh".to_owned()) } else { base(&program) }
}

#[cfg(not(target_os = "linux"))]
fn parent_name() -> Option<String> {
    None
}
