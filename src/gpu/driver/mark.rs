//! What a process was doing in the driver's library when it hung or crashed there: each thread notes a call before it is made and after it came back,
//! in a file that the process which waits for it reads. Without a file nothing is noted.

use std::cell::Cell;
use std::fs::File;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a thread's note: number of the note, whether the call is under way, its name.
const NOTE: usize = 64;
/// Threads whose calls are noted.
const THREADS: u64 = 64;

static FILE: OnceLock<File> = OnceLock::new();
static NEXT: AtomicU64 = AtomicU64::new(0);
/// Notes of all threads so far: the order in which calls were entered.
static COUNT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static SLOT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Notes calls in this file from now on, for the whole process.
///
/// # Errors
/// It cannot be opened.
pub fn into(path: &Path) -> std::io::Result<()> {
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
    let _ = FILE.set(file);
    Ok(())
}

fn note(state: char, call: &str) {
    let Some(file) = FILE.get() else { return };
    let slot = SLOT.get().unwrap_or_else(|| {
        let slot = NEXT.fetch_add(1, Ordering::Relaxed);
        SLOT.set(Some(slot));
        slot
    });
    if slot >= THREADS {
        return;
    }
    let count = COUNT.fetch_add(1, Ordering::Relaxed) + 1;
    let mut line = format!("{count:016x} {state} {call:.40}");
    line.extend(std::iter::repeat_n(' ', NOTE.saturating_sub(line.len())));
    // What cannot be noted is only not known.
    #[cfg(unix)]
    let _ = std::os::unix::fs::FileExt::write_all_at(file, &line.as_bytes()[..NOTE.min(line.len())], slot * NOTE as u64);
}

/// The calling thread is about to make a call.
pub fn begin(call: impl std::fmt::Display) {
    if FILE.get().is_some() {
        note('+', &call.to_string());
    }
}

/// The call came back.
pub fn end() {
    if FILE.get().is_some() {
        note('-', "");
    }
}

/// Notes a call around `work`.
pub fn during<T>(call: &str, work: impl FnOnce() -> T) -> T {
    begin(call);
    let result = work();
    end();
    result
}

/// As [`during`], for a call that nobody waits for: a crash in it is told, a hang is not.
pub fn during_unwaited<T>(call: &str, work: impl FnOnce() -> T) -> T {
    if FILE.get().is_some() {
        note('~', call);
    }
    let result = work();
    end();
    result
}

/// A call that is under way, as far as the notes go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Underway {
    /// Its name.
    pub call: String,
    /// Since when at least: the first look that found it so.
    pub waited: Duration,
}

/// What a thread has noted last.
#[derive(Debug, Clone)]
struct Seen {
    /// Number of the note.
    count: u64,
    /// The call, if one is under way, and whether it is waited for.
    call: Option<(String, bool)>,
    /// When this note was first seen.
    since: Instant,
}

/// Reads the notes of another process again and again.
#[derive(Debug, Default)]
pub struct Reader {
    /// By thread.
    seen: Vec<Seen>,
}

impl Reader {
    /// Looks at the notes. The call that has been waited for for longest.
    pub fn look(&mut self, path: &Path) -> Option<Underway> {
        let bytes = std::fs::read(path).unwrap_or_default();
        let now = Instant::now();
        for (thread, note) in bytes.chunks_exact(NOTE).take(THREADS as usize).enumerate() {
            let text = String::from_utf8_lossy(note);
            let mut words = text.split_whitespace();
            // A thread that has noted nothing yet is a gap of zeros.
            let Some(count) = words.next().and_then(|word| u64::from_str_radix(word, 16).ok()) else { continue };
            let state = words.next().unwrap_or_default();
            let call = matches!(state, "+" | "~").then(|| (words.collect::<Vec<_>>().join(" "), state == "+"));
            while self.seen.len() <= thread {
                self.seen.push(Seen { count: 0, call: None, since: now });
            }
            if self.seen[thread].count != count {
                self.seen[thread] = Seen { count, call, since: now };
            }
        }
        let under_way = self.seen.iter().filter_map(|seen| Some((seen.call.as_ref().filter(|(_, waited)| *waited)?, seen.since)));
        under_way
            .min_by_key(|(_, since)| *since)
            .map(|((call, _), since)| Underway { call: call.clone(), waited: now.saturating_duration_since(since) })
    }

    /// All calls under way at the last look, the one that was entered last first.
    pub fn entered(&self) -> Vec<String> {
        let mut found: Vec<(u64, &String)> = self.seen.iter().filter_map(|seen| Some((seen.count, &seen.call.as_ref()?.0))).collect();
        found.sort_by(|a, b| b.cmp(a));
        found.into_iter().map(|(_, call)| call.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_under_way_is_known_from_outside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes");
        let mut reader = Reader::default();
        assert_eq!(reader.look(&path), None);
        let write = |slot: usize, text: &str| {
            let mut bytes = std::fs::read(&path).unwrap_or_default();
            bytes.resize(bytes.len().max((slot + 1) * NOTE), 0);
            bytes[slot * NOTE..(slot + 1) * NOTE].copy_from_slice(format!("{text:<64}").as_bytes());
            std::fs::write(&path, bytes).unwrap();
        };
        write(1, "0000000000000001 + cuInit");
        assert_eq!(reader.look(&path).map(|found| found.call).as_deref(), Some("cuInit"));
        std::thread::sleep(Duration::from_millis(20));
        assert!(reader.look(&path).is_some_and(|found| found.waited >= Duration::from_millis(20)));
        write(0, "0000000000000007 + loading libcuda.so");
        assert_eq!(reader.look(&path).map(|found| found.call).as_deref(), Some("cuInit"), "the longest");
        write(1, "0000000000000002 -");
        assert_eq!(reader.look(&path).map(|found| found.call).as_deref(), Some("loading libcuda.so"));
        // A crash comes in the call that was entered last, as far as can be told; one that nobody waits for can crash, and not hang.
        write(2, "0000000000000009 ~ NVML (starting)");
        assert_eq!(reader.look(&path).map(|found| found.call).as_deref(), Some("loading libcuda.so"));
        assert_eq!(reader.entered(), ["NVML (starting)", "loading libcuda.so"]);
        write(0, "000000000000000a -");
        assert_eq!(reader.look(&path), None);
        assert_eq!(reader.entered(), ["NVML (starting)"]);
    }
}
