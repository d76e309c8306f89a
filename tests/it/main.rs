//! Black-box tests of the binary, one file per command group, through one hermetic `TestEnv`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

mod attack;
mod change;
mod concurrency;
mod create;
mod environments;
mod export;
mod gpu;
mod host;
mod hostile;
mod interop;
mod lock;
mod malformed;
mod pip;
mod reference;
mod wheels;
