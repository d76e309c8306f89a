//! `tare gpu`

use clap::Subcommand;

use crate::error::Result;
use crate::ui::Printer;

/// Explain and predict GPU memory
#[derive(Debug, Subcommand)]
pub enum GpuCommand {}

pub fn run(command: GpuCommand, _printer: &Printer) -> Result<u8> {
    match command {}
}
