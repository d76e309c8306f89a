//! Black-box tests of the binary, one file per command group, through one hermetic `TestEnv`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

mod attack;
mod change;
mod check;
mod concurrency;
mod create;
mod digest;
mod documents;
mod environments;
mod export;
mod faults;
mod gpu;
mod gpu_driver;
mod gpu_selftest;
mod host;
mod hostile;
mod interop;
mod links;
mod lock;
mod malformed;
mod notebook;
mod pip;
mod pip_locks;
mod reference;
mod repair;
mod shells;
mod site;
mod wheels;
