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

/// A pickle assembler for tests: writes JSON-like values as protocol 4, with a memo for strings like the C pickler.
pub(crate) mod assemble {
    use serde_json::Value;
    use std::collections::HashMap;

    #[derive(Default)]
    pub(crate) struct Assembler {
        pub bytes: Vec<u8>,
        memo: HashMap<String, u32>,
        next: u32,
    }

    pub(crate) fn pickle(value: &Value) -> Vec<u8> {
        let mut assembler = Assembler { bytes: vec![0x80, 4], ..Assembler::default() };
        assembler.value(value);
        assembler.bytes.push(b'.');
        assembler.bytes
    }

    impl Assembler {
        fn memoize(&mut self) -> u32 {
            self.bytes.push(0x94);
            self.next += 1;
            self.next - 1
        }

        fn value(&mut self, value: &Value) {
            match value {
                Value::Null => self.bytes.push(b'N'),
                Value::Bool(on) => self.bytes.push(if *on { 0x88 } else { 0x89 }),
                Value::Number(number) => match number.as_i64() {
                    Some(small @ 0..=255) => self.bytes.extend([b'K', small as u8]),
                    Some(small @ 256..=65535) => {
                        self.bytes.push(b'M');
                        self.bytes.extend((small as u16).to_le_bytes());
                    }
                    Some(wide) => {
                        self.bytes.extend([0x8a, 8]);
                        self.bytes.extend(wide.to_le_bytes());
                    }
                    None => {
                        self.bytes.push(b'G');
                        self.bytes.extend(number.as_f64().unwrap().to_be_bytes());
                    }
                },
                Value::String(text) => match self.memo.get(text) {
                    Some(index) => {
                        self.bytes.push(b'j');
                        self.bytes.extend(index.to_le_bytes());
                    }
                    None => {
                        self.bytes.extend([0x8c, text.len() as u8]);
                        self.bytes.extend(text.as_bytes());
                        let index = self.memoize();
                        self.memo.insert(text.clone(), index);
                    }
                },
                Value::Array(items) => {
                    self.bytes.push(b']');
                    self.memoize();
                    self.bytes.push(b'(');
                    items.iter().for_each(|item| self.value(item));
                    self.bytes.push(b'e');
                }
                Value::Object(items) => {
                    self.bytes.push(b'}');
                    self.memoize();
                    self.bytes.push(b'(');
                    for (key, value) in items {
                        self.value(&Value::String(key.clone()));
                        self.value(value);
                    }
                    self.bytes.push(b'u');
                }
            }
        }
    }
}

/// A snapshot with every key of torch 2.15, and one unknown key at each level.
fn newest() -> serde_json::Value {
    let frames =
        serde_json::json!([{"name": "f", "filename": "a.py", "line": 3}, {"name": "g", "filename": "b.py", "line": 70000, "col": 1}]);
    serde_json::json!({
        "segments": [{
            "device": 0, "address": 0x7f00_0000_0000_u64, "total_size": 2097152, "allocated_size": 512, "active_size": 1024, "requested_size": 10,
            "stream": 7, "segment_type": "small", "segment_pool_id": [3, 1], "is_expandable": true, "frames": [], "colour": "red",
            "blocks": [
                {"address": 0x7f00_0000_0000_u64, "size": 512, "requested_size": 10, "state": "active_allocated", "frames": frames},
                {"address": 0x7f00_0000_0200_u64, "size": 512, "requested_size": 10, "state": "active_awaiting_free", "frames": []},
                {"address": 0x7f00_0000_0400_u64, "size": 2096128, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        }],
        "device_traces": [[], [
            {"action": "alloc", "addr": 4096, "size": 10, "stream": 0, "time_us": 5, "frames": frames, "compile_context": "N/A", "user_metadata": "m",
             "internal_metadata": "i", "pool_id": [3, 1], "forward_frames": ["line one"]},
            {"action": "oom", "device_free": 99, "size": 20971520, "stream": 0, "frames": []},
            {"action": "dance", "addr": 1, "size": 1, "stream": 0},
        ]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "max_split_size": 67108864, "garbage_collection_threshold": 0.5,
            "expandable_segments": true, "roundup_power2_divisions": {"1": 0, "2": 8}, "max_round_threshold": 1},
        "external_annotations": [{"stage": "START", "name": "step", "device": 0, "time_us": 4}],
        "host_segments": [1, 2], "host_traces": [[1, 2, 3]],
        "extra": {"deep": [1, {"x": "y"}]},
    })
}

fn check_newest(snapshot: &Snapshot) {
    assert_eq!(snapshot.generation, Generation::V4);
    let segment = &snapshot.segments[0];
    assert_eq!((segment.stream, segment.class, segment.pool_id, segment.expandable), (7, SizeClass::Small, (3, 1), true));
    assert_eq!(segment.blocks[1].state, BlockState::ActivePendingFree);
    let names = &snapshot.names;
    let frames = names.stack(segment.blocks[0].stack);
    assert_eq!(names.describe(frames[0]), "f (a.py:3)");
    assert_eq!(names.describe(frames[1]), "g (b.py:70000)");
    let trace = snapshot.trace(1);
    assert_eq!(trace[0].stack, segment.blocks[0].stack);
    assert_eq!((trace[0].action, trace[0].time(), snapshot.pool_of(&trace[0])), (Action::Alloc, Some(5), Some((3, 1))));
    assert_eq!(names.text(trace[0].user_metadata), "m");
    assert_eq!(names.describe(names.stack(trace[0].forward_stack)[0]), "line one");
    assert_eq!((trace[1].action, trace[1].addr, trace[1].time(), snapshot.pool_of(&trace[1])), (Action::Oom, 99, None, None));
    assert_eq!(trace[2].action, Action::Other);
    let settings = snapshot.settings.as_ref().unwrap();
    assert_eq!((settings.conf.as_str(), settings.max_split_size), ("max_split_size_mb:64", Some(64 << 20)));
    assert_eq!(settings.roundup_power2_divisions, [(1, 0), (2, 8)]);
    assert_eq!(settings.raw["max_round_threshold"], 1);
    assert_eq!(snapshot.host_items, 5);
    assert_eq!(snapshot.devices(), [0, 1]);
    insta::allow_duplicates! {
    insta::assert_snapshot!(snapshot.warnings.join("\n"), @r#"
    unknown action `dance`
    unknown key `col` in a frame (2 times)
    unknown key `colour` in a segment
    unknown key `extra` at the top, kept here: {"deep":[1,"…"]}
    5 items of the host allocator are counted but not interpreted
    "#);    }
}

#[test]
fn every_key_of_the_newest_layout_from_pickle_and_json() {
    let bytes = assemble::pickle(&newest());
    check_newest(&read_bytes(&bytes, &Limits::default()).unwrap());
    check_newest(&read_bytes(newest().to_string().as_bytes(), &Limits::default()).unwrap());
    let mut marked = vec![0xEF, 0xBB, 0xBF];
    marked.extend(newest().to_string().as_bytes());
    check_newest(&read_bytes(&marked, &Limits::default()).unwrap());
}

#[test]
fn a_source_that_gives_one_byte_at_a_time_reads_the_same() {
    struct Drip<'a>(&'a [u8]);
    impl Read for Drip<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            let count = self.0.len().min(1).min(out.len());
            out[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }
    let bytes = assemble::pickle(&newest());
    check_newest(&read(Drip(&bytes), &Limits::default()).unwrap());
}

#[test]
fn torch_2_0_blocks_have_a_history_and_get_their_addresses_from_the_segment() {
    let value = serde_json::json!({"segments": [{"device": 0, "address": 4096, "total_size": 2048, "allocated_size": 0, "active_size": 0,
        "requested_size": 0, "stream": 0, "segment_type": "large", "blocks": [
            {"size": 512, "requested_size": 400, "state": "active_allocated",
             "history": [{"addr": 4096, "real_size": 400, "frames": [{"filename": "x.py", "name": "new", "line": 1}]},
                         {"addr": 4096, "real_size": 100, "frames": [{"filename": "x.py", "name": "old", "line": 1}]}]},
            {"size": 1536, "requested_size": 0, "state": "inactive"}]}], "device_traces": []});
    let snapshot = read_bytes(&assemble::pickle(&value), &Limits::default()).unwrap();
    assert_eq!(snapshot.generation, Generation::V0);
    let blocks = &snapshot.segments[0].blocks;
    assert_eq!((blocks[0].address, blocks[1].address), (4096, 4608));
    assert_eq!(snapshot.names.describe(super::super::frames::holder(&snapshot.names, blocks[0].stack).unwrap()), "new (x.py:1)");
    assert!(snapshot.warnings.is_empty());
}

#[test]
fn cut_at_any_byte_is_an_error_that_says_where() {
    let bytes = assemble::pickle(&newest());
    for length in 0..bytes.len() {
        let error = read_bytes(&bytes[..length], &Limits::default()).unwrap_err();
        assert!(!error.hints().is_empty(), "{length}: {error}");
        if length >= 2 {
            assert!(error.message().contains(&format!("the file ends at byte {length}")), "{length}: {error}");
        }
    }
    let text = newest().to_string();
    for length in 0..text.len() {
        let error = read_bytes(&text.as_bytes()[..length], &Limits::default()).unwrap_err();
        assert!(!error.hints().is_empty(), "{length}: {error}");
    }
}

#[test]
fn any_changed_byte_is_read_or_refused_without_panic() {
    let bytes = assemble::pickle(&newest());
    for at in 0..bytes.len() {
        for change in [0x00, 0x01, 0x2E, 0x63, 0x6A, 0x80, 0xFF] {
            let mut changed = bytes.clone();
            changed[at] ^= change;
            let _ = read_bytes(&changed, &Limits::default());
        }
    }
}

#[test]
fn opcodes_that_could_run_code_are_refused_by_name_and_place() {
    let cases: [(&str, &[u8]); 20] = [
        ("GLOBAL", b"cos\nsystem\n"),
        ("REDUCE", b"R"),
        ("BUILD", b"b"),
        ("INST", b"i"),
        ("OBJ", b"o"),
        ("NEWOBJ", b"\x81"),
        ("NEWOBJ_EX", b"\x92"),
        ("STACK_GLOBAL", b"\x93"),
        ("EXT1", b"\x82\x01"),
        ("EXT2", b"\x83\x01\x00"),
        ("EXT4", b"\x84\x01\x00\x00\x00"),
        ("PERSID", b"P1\n"),
        ("BINPERSID", b"Q"),
        ("BINBYTES", b"B\x00\x00\x00\x00"),
        ("BYTEARRAY8", b"\x96"),
        ("NEXT_BUFFER", b"\x97"),
        ("DUP", b"2"),
        ("POP", b"0"),
        ("EMPTY_SET", b"\x8f"),
        ("FROZENSET", b"\x91"),
    ];
    for (name, bytes) in cases {
        let mut file = vec![0x80, 4, b'}', 0x94];
        file.extend(bytes);
        let error = read_bytes(&file, &Limits::default()).unwrap_err();
        assert_eq!(error.message(), format!("opcode `{name}` is not allowed"));
        assert_eq!(error.causes().last().unwrap(), &format!("at byte 4, opcode `{name}`"));
        assert_eq!(error.hints().len(), 1);
    }
    let error = read_bytes(b"\x80\x04\xff", &Limits::default()).unwrap_err();
    insta::assert_snapshot!(error, @"byte 0xff is no pickle opcode: at byte 2, opcode `0xff`");
}

#[test]
fn files_made_to_exhaust_memory_are_refused_early() {
    let limits = Limits { base: 1 << 20, per_byte: 24, total: 64 << 20, string: 1 << 16 };
    // A length that promises 4 GiB, and one of 2^63.
    for file in [&b"\x80\x04X\xff\xff\xff\xffabc"[..], b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc", b"\x80\x04\x8b\xff\xff\xff\x7f"]
    {
        assert!(read_bytes(file, &limits).is_err());
    }
    // Within the limit of a string, but the file ends.
    assert!(read_bytes(b"\x80\x04X\xff\xff\x00\x00abc", &limits).unwrap_err().message().contains("ends at byte 10"));
    // Lists of lists of lists: 2^60 items if it were expanded.
    let mut file = vec![0x80, 4, b']', 0x94];
    for level in 0..60_u32 {
        file.extend([b']', 0x94, b'(']);
        for _ in 0..2 {
            file.push(b'j');
            file.extend(level.to_le_bytes());
        }
        file.push(b'e');
    }
    file.push(b'.');
    assert!(read_bytes(&file, &limits).is_err());
    // The same under a key that is kept as text.
    let mut file = vec![0x80, 4, b'}', 0x94, b'(', 0x8c, 8];
    file.extend(b"segments]\x8c\x05extra");
    let mut nested = vec![b']', 0x94];
    for level in 1..60_u32 {
        nested.extend([b'(', b']', 0x94, b'(']);
        for _ in 0..1000 {
            nested.push(b'j');
            nested.extend(level.to_le_bytes());
        }
        nested.extend(b"ee");
    }
    file.extend(nested);
    file.extend(b"u.");
    let _ = read_bytes(&file, &limits);
    // Depth: a million open lists, dicts and marks.
    for op in [b']', b'}', b'('] {
        let mut file = vec![0x80, 4];
        file.resize(1_000_000, op);
        assert!(read_bytes(&file, &limits).is_err());
    }
    assert!(read_bytes("[".repeat(100_000).as_bytes(), &limits).is_err());
    // One list of 20,000 blocks named by 20,000 segments: 16 GiB of copies.
    let mut file = vec![0x80, 4];
    let string = |file: &mut Vec<u8>, text: &str| {
        file.extend([0x8c, text.len() as u8]);
        file.extend(text.as_bytes());
    };
    file.extend(b"}(");
    string(&mut file, "segments");
    file.extend(b"](");
    let blocks = |file: &mut Vec<u8>| {
        file.extend(b"}(");
        string(file, "blocks");
    };
    blocks(&mut file);
    file.extend([b']', 0x94, b'(']);
    for _ in 0..20_000 {
        file.extend(b"}(");
        string(&mut file, "state");
        string(&mut file, "inactive");
        file.push(b'u');
    }
    file.extend(b"eu");
    for _ in 0..20_000 {
        blocks(&mut file);
        file.extend(b"h\x00u");
    }
    file.extend(b"eu.");
    let error = read_bytes(&file, &Limits { base: 16 << 20, per_byte: 24, ..Limits::default() }).unwrap_err();
    assert!(error.message().contains("memory"), "{error}");
}

#[test]
fn other_files_are_recognised() {
    let case = |bytes: &[u8]| {
        let error = read_bytes(bytes, &Limits::default()).unwrap_err();
        format!("{error}\n  hint: {}", error.hints().first().map_or("", String::as_str))
    };
    insta::assert_snapshot!([case(b""), case(b"\x1f\x8b"), case(b"PK\x03\x04"), case(b"(dp0\n."), case(b"hello"), case(b"{\"a\": 1}"), case(b"\x80\x04K\x01."), case(b"\x80\x07")].join("\n"), @r#"
    the file is empty
      hint: the run that wrote it may have been stopped; record the snapshot again
    the file is compressed (gzip)
      hint: unpack it first: gunzip FILE
    the file is a zip archive, not a snapshot
      hint: `torch.save` writes such archives; record with torch.cuda.memory._dump_snapshot("snapshot.pickle") instead
    the file is a pickle of protocol 0 or 1, which is not supported
      hint: write it again with protocol 4: pickle.dump(pickle.load(open(FILE, 'rb')), open(NEW, 'wb'), protocol=4)
    the file is no snapshot: neither a pickle nor JSON (first byte 0x68)
      hint: a snapshot is written by torch.cuda.memory._dump_snapshot("snapshot.pickle")
    the file has no `segments`, so it is no allocator snapshot
      hint: a snapshot is written by torch.cuda.memory._dump_snapshot("snapshot.pickle")
    the content of the file is not a snapshot (a dict with `segments` and `device_traces`)
      hint: the file is no allocator snapshot, or a newer PyTorch changed the layout; record with torch.cuda.memory._dump_snapshot
    pickle protocol 7 is not supported (2 to 5 are): at byte 0, opcode `PROTO`
      hint: write it again with protocol 4: pickle.dump(pickle.load(open(FILE, 'rb')), open(NEW, 'wb'), protocol=4)
    "#);
}

proptest::proptest! {
    #[test]
    fn random_bytes_never_panic(mut bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..400)) {
        let _ = read_bytes(&bytes, &Limits::default());
        bytes.splice(0..0, [0x80, 4]);
        let _ = read_bytes(&bytes, &Limits::default());
    }

    #[test]
    fn random_opcodes_never_panic(ops in proptest::collection::vec(proptest::sample::select(&b"(.JKMNXaehjqrstu}])G\x85\x86\x87\x88\x89\x8a\x94"[..]), 0..300)) {
        let mut bytes = vec![0x80, 4];
        for op in ops {
            bytes.push(op);
            // Small operands keep the machine going.
            bytes.extend(match op { b'K' | b'h' | b'q' | 0x8a => &[1_u8][..], b'M' => &[1, 0], b'J' | b'X' | b'j' | b'r' => &[1, 0, 0, 0], b'G' => &[0; 8], _ => &[] });
            if op == b'X' || op == 0x8a { bytes.push(b'a'); }
        }
        let _ = read_bytes(&bytes, &Limits::default());
    }
}
