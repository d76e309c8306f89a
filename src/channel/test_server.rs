//! A small HTTP/1.1 server for tests: folders and texts in memory, with faults on demand.
//!
//! Only the loopback interface; at most [`MAX_REQUESTS`] requests and [`MAX_LIFE`]; one thread a connection. Uses
//! nothing of the crate, so that black-box tests can include it by `#[path]`.
#![allow(dead_code, reason = "each test crate uses a part of it")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// No test needs more.
pub const MAX_REQUESTS: usize = 20_000;
/// A forgotten server ends after this.
pub const MAX_LIFE: Duration = Duration::from_secs(180);

/// What goes wrong, or is asked for, at paths that begin with a prefix.
#[derive(Debug, Clone)]
pub enum Fault {
    /// This status, without a body but with these headers, for so many requests.
    Status { code: u16, times: usize, headers: Vec<(String, String)> },
    /// The connection is closed after so many bytes of the body, for so many requests.
    Truncate { after: usize, times: usize },
    /// The connection is closed without an answer, for so many requests.
    Hangup { times: usize },
    /// So long a wait before the answer.
    Slow(Duration),
    /// A different body, with status 200.
    Body(Vec<u8>),
    /// 302 to this URL plus what follows the prefix.
    Redirect(String),
}

/// What a request must bring along; else the answer is 401.
#[derive(Debug, Clone)]
pub enum Guard {
    /// `Authorization: Bearer`.
    Bearer(String),
    /// `Authorization: Basic`, the encoded part.
    Basic(String),
    /// The path begins with `/t/TOKEN/`, which is taken off.
    Token(String),
}

/// One request as it came.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub headers: HashMap<String, String>,
    pub status: u16,
}

#[derive(Default)]
struct State {
    files: Mutex<HashMap<String, Vec<u8>>>,
    folders: Mutex<Vec<(String, PathBuf)>>,
    faults: Mutex<Vec<(String, Fault)>>,
    guard: Mutex<Option<Guard>>,
    seen: Mutex<Vec<Seen>>,
    count: AtomicUsize,
    stop: AtomicBool,
}

/// The server; it stops when it is dropped.
pub struct TestServer {
    state: Arc<State>,
    port: u16,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Default for TestServer {
    fn default() -> Self {
        Self::new()
    }
}

impl TestServer {
    pub fn new() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let state = Arc::new(State::default());
        let shared = state.clone();
        std::thread::spawn(move || {
            let born = Instant::now();
            for connection in listener.incoming() {
                if shared.stop.load(Ordering::SeqCst) || born.elapsed() > MAX_LIFE {
                    return;
                }
                let Ok(connection) = connection else { continue };
                let shared = shared.clone();
                std::thread::spawn(move || converse(connection, &shared));
            }
        });
        TestServer { state, port }
    }

    /// A port on which nobody listens.
    pub fn closed_port() -> u16 {
        TcpListener::bind(("127.0.0.1", 0)).expect("a free port").local_addr().expect("an address").port()
    }

    /// `http://127.0.0.1:PORT` and the path.
    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Serves bytes at a path (`/channel/noarch/repodata.json`).
    pub fn put(&self, path: &str, bytes: impl Into<Vec<u8>>) -> &Self {
        self.state.files.lock().unwrap().insert(path.to_owned(), bytes.into());
        self
    }

    /// Serves a folder below a path prefix that ends without a slash.
    pub fn mount(&self, prefix: &str, folder: impl Into<PathBuf>) -> &Self {
        self.state.folders.lock().unwrap().push((prefix.to_owned(), folder.into()));
        self
    }

    /// Adds a fault; the first that fits a path and is not used up counts.
    pub fn fault(&self, prefix: &str, fault: Fault) -> &Self {
        self.state.faults.lock().unwrap().push((prefix.to_owned(), fault));
        self
    }

    /// Removes all faults.
    pub fn heal(&self) -> &Self {
        self.state.faults.lock().unwrap().clear();
        self
    }

    pub fn guard(&self, guard: Guard) -> &Self {
        *self.state.guard.lock().unwrap() = Some(guard);
        self
    }

    /// All requests so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().unwrap().clone()
    }

    /// How many requests of this method had a path that ends so.
    pub fn count(&self, method: &str, end: &str) -> usize {
        self.seen().iter().filter(|seen| seen.method == method && seen.path.ends_with(end)).count()
    }
}

fn converse(connection: TcpStream, state: &State) {
    let _ = connection.set_read_timeout(Some(Duration::from_secs(10)));
    let _ = connection.set_write_timeout(Some(Duration::from_secs(10)));
    let Ok(mut writer) = connection.try_clone() else { return };
    let mut reader = BufReader::new(connection.take(1 << 20));
    let mut first = String::new();
    if reader.read_line(&mut first).is_err() || state.stop.load(Ordering::SeqCst) {
        return;
    }
    let mut words = first.split_whitespace();
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return };
    let (method, path) = (method.to_owned(), path.to_owned());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).is_err() || line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':') {
            headers.insert(name.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    if state.count.fetch_add(1, Ordering::SeqCst) >= MAX_REQUESTS {
        return;
    }
    let answer = answer(state, &path, &headers);
    let status = match &answer {
        Answer::Whole { status, .. } => *status,
        Answer::Cut { .. } => 200,
        Answer::Nothing => 0,
    };
    state.seen.lock().unwrap().push(Seen { method: method.clone(), path, headers, status });
    let head = |status: u16, length: usize, extra: &[(String, String)]| {
        let mut head = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n");
        for (name, value) in extra {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head + "\r\n"
    };
    match answer {
        Answer::Nothing => {}
        Answer::Whole { status, headers, body } => {
            let _ = writer.write_all(head(status, body.len(), &headers).as_bytes());
            if method != "HEAD" {
                let _ = writer.write_all(&body);
            }
        }
        Answer::Cut { body, after } => {
            let _ = writer.write_all(head(200, body.len(), &[]).as_bytes());
            if method != "HEAD" {
                let _ = writer.write_all(&body[..after.min(body.len())]);
            }
        }
    }
    let _ = writer.flush();
}

enum Answer {
    Whole { status: u16, headers: Vec<(String, String)>, body: Vec<u8> },
    Cut { body: Vec<u8>, after: usize },
    Nothing,
}

fn answer(state: &State, path: &str, headers: &HashMap<String, String>) -> Answer {
    let whole = |status: u16, body: Vec<u8>| Answer::Whole { status, headers: Vec::new(), body };
    let mut path = path.split(['?', '#']).next().unwrap_or_default().to_owned();
    let given = headers.get("authorization").map(String::as_str).unwrap_or_default();
    match state.guard.lock().unwrap().as_ref() {
        Some(Guard::Bearer(token)) if given != format!("Bearer {token}") => return whole(401, Vec::new()),
        Some(Guard::Basic(encoded)) if given != format!("Basic {encoded}") => return whole(401, Vec::new()),
        Some(Guard::Token(token)) => match path.strip_prefix(&format!("/t/{token}")) {
            Some(rest) => path = rest.to_owned(),
            None => return whole(401, Vec::new()),
        },
        _ => {}
    }
    let fault = {
        let mut faults = state.faults.lock().unwrap();
        let mut found = None;
        for (prefix, fault) in faults.iter_mut() {
            if !path.starts_with(prefix.as_str()) {
                continue;
            }
            match fault {
                Fault::Status { times, .. } | Fault::Truncate { times, .. } | Fault::Hangup { times } => {
                    if *times == 0 {
                        continue;
                    }
                    *times -= 1;
                }
                _ => {}
            }
            found = Some((prefix.clone(), fault.clone()));
            break;
        }
        found
    };
    let body = body(state, &path);
    match fault {
        Some((_, Fault::Status { code, headers, .. })) => Answer::Whole { status: code, headers, body: Vec::new() },
        Some((_, Fault::Hangup { .. })) => Answer::Nothing,
        Some((_, Fault::Body(bytes))) => whole(200, bytes),
        Some((prefix, Fault::Redirect(to))) => Answer::Whole {
            status: 302,
            headers: vec![("location".to_owned(), format!("{to}{}", &path[prefix.len()..]))],
            body: Vec::new(),
        },
        Some((_, Fault::Truncate { after, .. })) => match body {
            Some(body) => Answer::Cut { body, after },
            None => whole(404, Vec::new()),
        },
        other => {
            if let Some((_, Fault::Slow(wait))) = other {
                std::thread::sleep(wait.min(Duration::from_secs(10)));
            }
            match body {
                // Pages of package indexes; their readers look at the type.
                Some(body) if path.ends_with('/') => {
                    Answer::Whole { status: 200, headers: vec![("content-type".to_owned(), "text/html".to_owned())], body }
                }
                Some(body) => whole(200, body),
                None => whole(404, b"not found".to_vec()),
            }
        }
    }
}

fn body(state: &State, path: &str) -> Option<Vec<u8>> {
    if let Some(bytes) = state.files.lock().unwrap().get(path) {
        return Some(bytes.clone());
    }
    for (prefix, folder) in state.folders.lock().unwrap().iter() {
        if let Some(rest) = path.strip_prefix(prefix.as_str())
            && !rest.split('/').any(|part| part == "..")
            && let Ok(bytes) = std::fs::read(folder.join(rest.trim_start_matches('/')))
        {
            return Some(bytes);
        }
    }
    None
}
