//! Parse, run, exit code; nothing else.
#![deny(unsafe_code)]

/// Plans and records are many small allocations on several threads, which the allocator of the C library is slow at.
#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    tare::cli::main()
}
