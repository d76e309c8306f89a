//! One screen of text, drawn again and again, for a person at a terminal. The terminal is as it was afterwards.

use std::io::{IsTerminal, Read, Write};
use std::time::Duration;

use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::error::{Error, Result};

/// Whether there is a terminal to draw on and to read keys from.
pub fn possible() -> bool {
    std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// What was pressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// Nothing.
    None,
    /// `q`, Escape, Ctrl-C, Ctrl-D, Ctrl-\\, or the terminal is gone.
    Quit,
    /// Ctrl-Z.
    Suspend,
    /// Anything else.
    Other,
}

/// Another screen, no cursor, nothing on it.
const TAKE: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";

/// The screen. Dropping it gives the terminal back.
pub struct Screen {
    before: Termios,
    raw: Termios,
}

impl Screen {
    /// Takes the terminal: another screen, no cursor, keys at once.
    ///
    /// # Errors
    /// It is no terminal.
    pub fn open() -> Result<Screen> {
        let failed =
            |error: rustix::io::Errno| Error::failure("cannot use the terminal").because(error).hint("print once instead: `--once`");
        let before = tcgetattr(std::io::stdin()).map_err(failed)?;
        let mut raw = before.clone();
        // Ctrl-C arrives as a key, so that the terminal can be given back.
        raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        raw.special_codes[SpecialCodeIndex::VMIN] = 0;
        raw.special_codes[SpecialCodeIndex::VTIME] = 1;
        tcsetattr(std::io::stdin(), OptionalActions::Now, &raw).map_err(failed)?;
        let screen = Screen { before, raw };
        screen.write(TAKE);
        Ok(screen)
    }

    /// The terminal as it was before, for as long as this process is stopped.
    pub fn give(&self) {
        self.write("\x1b[?25h\x1b[?1049l");
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
    }

    /// Takes the terminal again: a shell has set it up for itself meanwhile.
    pub fn take(&self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.raw);
        self.write(TAKE);
    }

    fn write(&self, text: &str) {
        let mut out = std::io::stdout().lock();
        // A terminal that is gone shows in the next key.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    /// Columns and rows.
    pub fn size(&self) -> (usize, usize) {
        match tcgetwinsize(std::io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (usize::from(size.ws_col), usize::from(size.ws_row)),
            _ => (80, 24),
        }
    }

    /// Shows a title with a remark at its right end, and below it as much of `text` as there is room for.
    pub fn draw(&mut self, title: &str, remark: &str, text: &str) {
        self.write(&frame(title, remark, text, self.size()));
    }

    /// Waits for a key, about as long as `limit`.
    pub fn key(&mut self, limit: Duration) -> Key {
        let mut byte = [0];
        // A read ends after a tenth of a second.
        for _ in 0..limit.as_millis().div_ceil(100).max(1) {
            match std::io::stdin().lock().read(&mut byte) {
                Ok(0) => {}
                Ok(_) => {
                    return match byte[0] {
                        b'q' | b'Q' | 3 | 4 | 0x1b | 0x1c => Key::Quit,
                        0x1a => Key::Suspend,
                        _ => Key::Other,
                    };
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return Key::Quit,
            }
        }
        Key::None
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.give();
    }
}

/// What is written for one picture: each line is cleared, then everything below.
fn frame(title: &str, remark: &str, text: &str, (columns, rows): (usize, usize)) -> String {
    let gap = columns.saturating_sub(title.len() + remark.len()).max(1);
    let mut picture = String::from("\x1b[H");
    let mut line = |content: &str, last: bool| {
        // Cleared first: after a full line the cursor stands on its last character.
        picture.push_str("\x1b[2K");
        picture.push_str(&cut(content, columns));
        picture.push_str(if last { "" } else { "\r\n" });
    };
    line(&format!("{title}{}{remark}", " ".repeat(gap)), false);
    let lines: Vec<&str> = text.lines().collect();
    let room = rows.saturating_sub(1).max(1);
    if lines.len() <= room {
        for (at, content) in lines.iter().enumerate() {
            line(content, at + 1 == lines.len());
        }
    } else {
        for content in &lines[..room - 1] {
            line(content, false);
        }
        line(&format!("({} more lines: use a taller window)", lines.len() - (room - 1)), true);
    }
    picture.push_str("\x1b[J");
    picture
}

fn cut(text: &str, columns: usize) -> String {
    let mut width = 0;
    text.chars()
        .take_while(|c| {
            width += unicode_width::UnicodeWidthChar::width(*c).unwrap_or(0);
            width <= columns
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::frame;

    #[test]
    fn a_picture_fits_the_window() {
        assert_eq!(frame("top", "q", "äb\nlong line", (6, 5)), "\x1b[H\x1b[2Ktop  q\r\n\x1b[2Käb\r\n\x1b[2Klong l\x1b[J");
        let text = "1\n2\n3\n4\n5\n";
        assert_eq!(frame("t", "q", text, (60, 4)).matches("\r\n").count(), 3);
        assert!(frame("t", "q", text, (60, 4)).ends_with("(3 more lines: use a taller window)\x1b[J"));
    }
}
