//! Tests of the reader: the real files, small hand-made ones, and everything that can be wrong with them.

use super::*;

/// The folder of recorded snapshots, or `None` with a remark where it is absent.
pub(crate) fn shared_snapshots() -> Option<Vec<std::path::PathBuf>> {
    let base = std::env::var_os("TARE_SHARED_DATA")
        .map_or_else(|| std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), std::path::PathBuf::from);
    let mut files: Vec<_> = std::fs::read_dir(base.join("snapshots"))
        .ok()?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "pickle"))
        .collect();
    files.sort();
    Some(files)
}

#[test]
fn reads_all_recorded_files() {
    let Some(files) = shared_snapshots() else {
        println!("skipped: no shared data");
        return;
    };
    for file in files {
        let snapshot = open(&file, &Limits::default()).unwrap();
        println!(
            "{}: {:?} {} segments, {} events, {} stacks, {:?}",
            file.file_name().unwrap().to_string_lossy(),
            snapshot.generation,
            snapshot.segments.len(),
            snapshot.traces.iter().map(Vec::len).sum::<usize>(),
            snapshot.names.stack_count(),
            snapshot.warnings
        );
        assert!(snapshot.warnings.is_empty(), "{:?}", snapshot.warnings);
        for segment in &snapshot.segments {
            let mut at = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, at);
                at += block.size;
            }
            assert_eq!(at, segment.address + segment.total_size);
        }
    }
}
