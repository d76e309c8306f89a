//! Parse, run, exit code; nothing else.
#![deny(unsafe_code)]

fn main() -> std::process::ExitCode {
    tare::cli::main()
}
