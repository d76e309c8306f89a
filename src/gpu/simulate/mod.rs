//! Scripted scenarios on the simulated GPU.
pub mod networks;
pub mod scenario;
use crate::error::Result;
fn check_conf(_: &str) -> Result<()> {
    Ok(())
}
