//! Byte code for the Python files of noarch packages.
//!
//! One process of the environment's own interpreter forks a child for each package, so that the byte code of a package depends on nothing but the
//! package and the interpreter: `marshal` marks objects by their reference counts, and files compiled before in the same process would change those.
//! The files are of the unchecked-hash kind (PEP 552), so that times do not matter, and name their source by its final path.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use rattler_conda_types::Subdir;
use rattler_conda_types::prefix_record::{PathType, PathsEntry};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::cancel::Cancel;
use super::metadata::set_mode;
use crate::child::Talk;
use crate::error::{Error, Result};
use crate::report::{Progress, TaskId};

/// Reads jobs from stdin as lines of JSON `[STAGE, FINAL, [RELATIVE PATH, ...]]`, one job a package; answers each with a line `NUMBER [[PATH, PYC], ...]`
/// of what was compiled. Runs with `-S -B -s` and an empty environment, so nothing is imported from or written to the environment but the .pyc files.
const DRIVER: &str = r#"
import sys
sys.path = [p for p in sys.path if p]
import importlib._bootstrap_external as external
import importlib.util, json, os
def compile_one(stage, final, rel):
    source_path = os.path.join(stage, rel)
    with open(source_path, 'rb') as f:
        source = f.read()
    code = compile(source, os.path.join(final, rel), 'exec', dont_inherit=True, optimize=-1)
    head, tail = os.path.split(rel)
    pyc = importlib.util.cache_from_source(rel, optimization='')
    data = external._code_to_hash_pyc(code, importlib.util.source_hash(source), False)
    target = os.path.join(stage, pyc)
    folder = os.path.dirname(target)
    if os.path.islink(folder):
        return None
    os.makedirs(folder, exist_ok=True)
    try:
        with open(target, 'xb') as f:
            f.write(data)
    except FileExistsError:
        return None
    return pyc
def job(stage, final, files, out):
    made = []
    for rel in files:
        try:
            pyc = compile_one(stage, final, rel)
        except (SyntaxError, ValueError, UnicodeError, RecursionError, MemoryError):
            continue
        if pyc is not None:
            made.append([rel, pyc])
    out.write(json.dumps(made))
    out.flush()
import encodings, encodings.utf_8, encodings.latin_1, encodings.ascii, warnings
warnings.simplefilter('ignore')
workers = int(sys.argv[1])
if sys.version_info[:2] != (int(sys.argv[2]), int(sys.argv[3])):
    sys.exit('this is Python %d.%d' % sys.version_info[:2])
sys.stdout.write('ready\n')
sys.stdout.flush()
jobs = [json.loads(line) for line in sys.stdin]
running = {}
failed = False
def wait():
    global failed
    pid, status = os.wait()
    number, read = running.pop(pid)
    os.lseek(read, 0, 0)
    with os.fdopen(read, 'r') as f:
        text = f.read()
    if status != 0:
        failed = True
        text = '[]'
    sys.stdout.write('%d %s\n' % (number, text))
    sys.stdout.flush()
for number, (stage, final, files, result) in enumerate(jobs):
    while len(running) >= workers:
        wait()
    read = os.open(result, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.unlink(result)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            out = os.fdopen(os.dup(read), 'w')
            job(stage, final, files, out)
            out.close()
            code = 0
        finally:
            os._exit(code)
    running[pid] = (number, read)
while running:
    wait()
sys.exit(1 if failed else 0)
"#;

/// The files of one package to compile.
pub(crate) struct Job {
    /// Index of the package.
    pub package: usize,
    /// Paths relative to the prefix, sorted.
    pub files: Vec<String>,
}

/// The files of `installed` that are compiled: Python sources in site-packages.
pub(crate) fn sources(installed: &[PathsEntry], site_packages: &Path) -> Vec<String> {
    let mut files: Vec<String> = installed
        .iter()
        .filter(|entry| {
            entry.original_path.is_none()
                && entry.path_type == PathType::HardLink
                && entry.relative_path.extension().is_some_and(|extension| extension == "py")
                && entry.relative_path.starts_with(site_packages)
        })
        .filter_map(|entry| entry.relative_path.to_str().map(str::to_owned))
        .collect();
    files.sort();
    files
}

/// What came of compiling.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// For each job: the new files.
    Done(Vec<Vec<PathsEntry>>),
    /// The interpreter cannot run here; why.
    CannotRun(String),
}

/// Compiles with the interpreter at `python` (relative to the stage).
#[allow(clippy::too_many_arguments)]
pub(crate) fn compile(
    stage: &Path,
    prefix: &Path,
    python: &Path,
    version: (u64, u64),
    subdir: Subdir,
    jobs: &[Job],
    progress: &dyn Progress,
    task: TaskId,
    cancel: &Cancel,
) -> Result<Outcome> {
    if Subdir::current() != Some(subdir) || subdir.is_windows() {
        return Ok(Outcome::CannotRun(format!("the environment is for {subdir}, which this machine cannot run")));
    }
    let interpreter = stage.join(python);
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    let mut command = Command::new(&interpreter);
    command
        .args(["-S", "-B", "-s", "-c", DRIVER])
        .args([workers.to_string(), version.0.to_string(), version.1.to_string()])
        .env_clear()
        // -E would also ignore the seed, which decides the order of constant sets.
        .env("PYTHONHASHSEED", "0")
        .env("PYTHONNOUSERSITE", "1")
        .env("LC_ALL", "C.UTF-8")
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // It writes into the stage, which the next run removes should this one be killed: it must not outlive it.
    let mut talk = match Talk::start(&mut command) {
        Ok(talk) => talk,
        Err(error) => return Ok(Outcome::CannotRun(format!("`{}` does not start: {error}", python.display()))),
    };
    let child = talk.child();
    let (Some(mut stdin), Some(stdout), Some(mut stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take()) else {
        return Err(Error::failure("cannot talk to the Python interpreter"));
    };
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = std::io::Read::read_to_string(&mut stderr, &mut text);
        text
    });
    // On a thread, so that Ctrl-C, which does not reach the group of the interpreter, is seen between two answers. The channel ends with the stream.
    let (sender, answers) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(|line| line.ok()) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let next = || -> Result<Option<String>> {
        loop {
            match answers.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => return Ok(Some(line)),
                Err(RecvTimeoutError::Timeout) => cancel.check()?,
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    };
    let ready = next()?.is_some_and(|line| line == "ready");
    if !ready {
        drop(stdin);
        let status = talk.wait();
        let text = errors.join().unwrap_or_default();
        let why = text
            .trim()
            .lines()
            .last()
            .map_or_else(|| status.map_or_else(|error| error.to_string(), |status| status.to_string()), str::to_owned);
        return Ok(Outcome::CannotRun(format!("`{}` does not run: {why}", python.display())));
    }
    let mut input = String::new();
    for (number, job) in jobs.iter().enumerate() {
        let result = stage.join(format!(".tare-compile-{number}"));
        let line = serde_json::json!([stage, prefix, job.files, result]);
        input.push_str(&line.to_string());
        input.push('\n');
    }
    // All jobs are read before the first answer is written, so this cannot block for ever.
    let written = stdin.write_all(input.as_bytes());
    drop(stdin);
    let mut made: Vec<Option<Vec<(String, String)>>> = vec![None; jobs.len()];
    let mut files_done = 0;
    while let Some(line) = next()? {
        cancel.check()?;
        let parsed = line
            .split_once(' ')
            .and_then(|(number, list)| Some((number.parse::<usize>().ok()?, serde_json::from_str::<Vec<(String, String)>>(list).ok()?)));
        if let Some((number, list)) = parsed
            && let Some(slot) = made.get_mut(number)
        {
            files_done += jobs[number].files.len() as u64;
            progress.advance_to(task, files_done);
            *slot = Some(list);
        }
    }
    let status = talk.wait().map_err(|error| Error::failure("the Python interpreter cannot be waited for").because(error))?;
    let text = errors.join().unwrap_or_default();
    if !status.success() || written.is_err() || made.iter().any(Option::is_none) {
        let why = text.trim().lines().last().map_or_else(|| status.to_string(), str::to_owned);
        return Err(Error::failure("compiling Python files failed").because(why).hint("to leave the byte code out: --no-compile"));
    }
    let made: Vec<Vec<(String, String)>> = made.into_iter().flatten().collect();
    let entries = made
        .into_par_iter()
        .map(|list| list.into_iter().map(|(_, pyc)| entry(stage, &pyc)).collect::<Result<Vec<_>>>())
        .collect::<Result<Vec<_>>>()?;
    Ok(Outcome::Done(entries))
}

fn entry(stage: &Path, pyc: &str) -> Result<PathsEntry> {
    let path = stage.join(pyc);
    set_mode(&path, 0o644)?;
    if let Some(folder) = path.parent() {
        set_mode(folder, 0o755)?;
    }
    let bytes = fs_err::read(&path).map_err(|error| Error::io("read", &path, &error))?;
    Ok(PathsEntry {
        relative_path: PathBuf::from(pyc),
        original_path: None,
        path_type: PathType::PycFile,
        no_link: false,
        sha256: None,
        sha256_in_prefix: Some(rattler_digest::compute_bytes_digest::<rattler_digest::Sha256>(&bytes)),
        size_in_bytes: Some(bytes.len() as u64),
        file_mode: None,
        prefix_placeholder: None,
    })
}
