//! Every `tare …` line of the documents is one that the program understands.

use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser};

use super::args::Cli;

/// Commands that the documents describe and that are not in this build yet.
const COMING: [&str; 4] = ["check", "init", "activate", "deactivate"];

/// The lines of code blocks: fenced ones, and those that are indented by four blanks. Lines that end in `\` are joined with the next.
fn code(text: &str) -> Vec<(usize, String)> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    let mut fence: Option<&str> = None;
    let mut joins = false;
    for (number, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        let marker = ["```", "~~~"].into_iter().find(|marker| trimmed.starts_with(marker));
        match (fence, marker) {
            (None, Some(marker)) => fence = Some(marker),
            (Some(open), Some(marker)) if open == marker => fence = None,
            (open, _) if open.is_some() || line.starts_with("    ") => {
                let body = trimmed.trim_end();
                let (body, more) = match body.strip_suffix('\\') {
                    Some(body) => (body, true),
                    None => (body, false),
                };
                match lines.last_mut() {
                    Some((_, last)) if joins => last.push_str(body),
                    _ => lines.push((number + 1, body.to_owned())),
                }
                joins = more;
            }
            _ => {}
        }
    }
    lines
}

/// The words of a shell command up to its end: an operator, a comment, a closing parenthesis.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut word: Option<String> = None;
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        match c {
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                for inner in characters.by_ref() {
                    if inner == c {
                        break;
                    }
                    word.push(inner);
                }
            }
            ' ' | '\t' => words.extend(word.take()),
            '#' if word.is_none() => break,
            '|' | ';' | '&' | '>' | '<' | ')' | '`' => {
                // `2>file`
                if word.as_deref().is_some_and(|word| word.len() == 1 && word.starts_with(|c: char| c.is_ascii_digit())) {
                    word = None;
                }
                break;
            }
            '$' if characters.peek() == Some(&'(') => break,
            '\\' => word.get_or_insert_default().extend(characters.next()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// The commands of a line that call tare.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, _) in line.match_indices("tare ") {
        let before = line[..at].trim_end();
        let starts = before.is_empty()
            || ["$", "&&", "||", "|", ";", "(", "`", "!", "run:", "-", "entry:", "if", "exec", "then", "eval \"$(", "time", ")"]
                .iter()
                .any(|word| before.ends_with(word))
            // Variables in front of the command.
            || before.split_whitespace().all(|word| word.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_')));
        let glued = line[..at].ends_with(|c: char| c.is_alphanumeric() || matches!(c, '/' | '.' | '_' | '-' | '`' | ':'));
        if starts && !glued {
            found.push(words(&line[at..]));
        }
    }
    found
}

/// What is wrong with a command line.
fn refused(words: &[String]) -> Option<String> {
    let command = words.iter().skip(1).find(|word| !word.starts_with('-'))?;
    let known = Cli::command();
    if COMING.contains(&command.as_str()) && known.find_subcommand(command).is_none() {
        return None;
    }
    // A synopsis, not a command: `tare verify [-n NAME | -p PATH] [LOCK]`.
    if words.iter().any(|word| word.starts_with('[') || word.contains('…') || word == "...") {
        return None;
    }
    match Cli::try_parse_from(words) {
        Ok(_) => None,
        Err(error) if matches!(error.kind(), clap::error::ErrorKind::DisplayHelp | clap::error::ErrorKind::DisplayVersion) => None,
        Err(error) => Some(error.to_string()),
    }
}

fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files: Vec<PathBuf> = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    // Generated from the definitions, with usage lines and no commands but the examples of the help texts.
    files.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    files.push(root.join("README.md"));
    files.push(root.join(".pre-commit-hooks.yaml"));
    files.sort();
    files
}

#[test]
fn every_command_of_the_documents_is_understood() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for file in documents() {
        let text = std::fs::read_to_string(&file).unwrap();
        let lines = if file.extension().is_some_and(|extension| extension == "md") {
            code(&text)
        } else {
            text.lines().enumerate().map(|(number, line)| (number + 1, line.to_owned())).collect()
        };
        for (number, line) in lines {
            for words in commands(&line) {
                count += 1;
                if let Some(why) = refused(&words) {
                    wrong.push(format!("{}:{number}: {}\n{why}", file.display(), words.join(" ")));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 100, "only {count} commands were found");
}

#[test]
fn commands_are_found_as_they_are_written() {
    let one = |line: &str| commands(line).into_iter().map(|words| words.join(" ")).collect::<Vec<_>>();
    assert_eq!(one("$ tare list -n 'a b'  # comment"), ["tare list -n a b"]);
    assert_eq!(one("eval \"$(tare shell-hook -n x)\""), ["tare shell-hook -n x"]);
    assert_eq!(one("tare diff a b > out.md || [ $? -eq 4 ]"), ["tare diff a b"]);
    assert_eq!(one("tare sync -n a && tare verify -n a 2>log"), ["tare sync -n a", "tare verify -n a"]);
    assert_eq!(one("CONDA_OVERRIDE_CUDA=12.6 tare lock -f e.yml"), ["tare lock -f e.yml"]);
    assert_eq!(one("        run: tare sync -n ci"), ["tare sync -n ci"]);
    assert_eq!(one("the cache of tare is big; ~/.cache/tare x"), [""; 0]);
    assert!(refused(&["tare".into(), "lock".into(), "--no-such-option".into()]).is_some());
    assert!(refused(&["tare".into(), "no-such-command".into()]).is_some());
}
