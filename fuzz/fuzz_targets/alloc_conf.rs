//! Any text as an allocator configuration: a sound configuration that reads back as itself, or an error with a place inside the text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tare_fuzz::gpu::alloc::config::Surroundings;
use tare_fuzz::gpu::alloc::{AllocConfig, Policy, TorchVersion};

fuzz_target!(|data: &[u8]| {
    let Some((version, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let policy = Policy::pytorch(TorchVersion::new(2, u32::from(*version % 18)));
    match AllocConfig::parse(text, &policy) {
        Ok((config, warnings)) => {
            for warning in warnings {
                assert!(!warning.message.is_empty());
            }
            let _ = config.warnings(&policy, &Surroundings { wsl2: true, no_pidfd: true });
            let shown = config.to_string();
            let (again, _) = AllocConfig::parse(&shown, &policy).unwrap_or_else(|error| panic!("`{shown}` does not read back: {error}"));
            assert_eq!(again.to_string(), shown);
        }
        Err(error) => {
            assert!(error.offset + error.len <= error.text.len(), "{error:?}");
            assert!(error.text.is_char_boundary(error.offset), "{error:?}");
            let _ = error.to_string();
            let _ = error.into_error("PYTORCH_CUDA_ALLOC_CONF").to_string();
        }
    }
});
