//! Reading snapshot files: one typed builder, driven by the pickle machine or by JSON.
//!
//! The builder never makes a generic tree of the whole file. A dict is recognised by its keys as soon as its items arrive and becomes
//! one fixed-size record; a list of frames becomes the id of an interned stack. What stays on the heap is therefore proportional
//! to the result, and every growth is charged against a budget that itself grows with the bytes read ([`Limits`]), so a small
//! file cannot ask for much memory.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use indexmap::IndexSet;

use super::model::*;
use crate::error::{Error, Result};

mod json;
mod pickle;

#[cfg(test)]
pub(crate) mod tests;

/// What a file may ask for.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of memory that are always allowed.
    pub base: u64,
    /// Further bytes of memory for each byte read so far. Real snapshots need less than 4.
    pub per_byte: u64,
    /// Absolute limit of memory in bytes.
    pub total: u64,
    /// Longest single string in bytes.
    pub string: u64,
}

impl Default for Limits {
    /// 64 MiB and 24 bytes a byte read, at most 32 GiB; strings up to 16 MiB.
    fn default() -> Self {
        Limits { base: 64 << 20, per_byte: 24, total: 32 << 30, string: 16 << 20 }
    }
}

/// Reads the snapshot file at `path`: a pickle of protocol 2 to 5, or JSON of the same dict.
///
/// # Errors
/// The file cannot be opened or read, is no snapshot, is damaged, or asks for more than `limits`. Messages carry the byte offset.
pub fn open(path: &Path, limits: &Limits) -> Result<Snapshot> {
    let file = std::fs::File::open(path).map_err(|error| {
        Error::io("open", path, &error).hint("write one with: python -c 'import torch; torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")' after torch.cuda.memory._record_memory_history()")
    })?;
    read(file, limits).map_err(|error| error.context(format!("cannot read the snapshot `{}`", path.display())))
}

/// Reads a snapshot from bytes. See [`open`].
///
/// # Errors
/// As [`open`].
pub fn read_bytes(bytes: &[u8], limits: &Limits) -> Result<Snapshot> {
    read(bytes, limits)
}

/// Reads a snapshot from a stream; the whole stream is never held in memory. See [`open`].
///
/// # Errors
/// As [`open`].
pub fn read(source: impl Read, limits: &Limits) -> Result<Snapshot> {
    let mut input = Input::new(source);
    input.ensure(2)?;
    match input.peek() {
        None => Err(Error::failure("the file is empty").hint("the run that wrote it may have been stopped; record the snapshot again")),
        Some(0x80) => pickle::read(input, *limits),
        Some(b'{' | b'[' | b' ' | b'\n' | b'\r' | b'\t' | 0xEF) => json::read(input, *limits),
        Some(0x1F) => Err(Error::failure("the file is compressed (gzip)").hint("unpack it first: gunzip FILE")),
        Some(b'P') => Err(Error::failure("the file is a zip archive, not a snapshot")
            .hint("`torch.save` writes such archives; record with torch.cuda.memory._dump_snapshot(\"snapshot.pickle\") instead")),
        Some(b'(' | b'}' | b']') => Err(Error::failure("the file is a pickle of protocol 0 or 1, which is not supported")
            .hint("write it again with protocol 4: pickle.dump(pickle.load(open(FILE, 'rb')), open(NEW, 'wb'), protocol=4)")),
        Some(byte) => Err(Error::failure(format!("the file is no snapshot: neither a pickle nor JSON (first byte 0x{byte:02x})"))
            .hint("a snapshot is written by torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")")),
    }
}

/// A buffered source that knows its offset.
struct Input<R> {
    source: R,
    buffer: Vec<u8>,
    at: usize,
    end: usize,
    /// Offset in the file of `buffer[0]`.
    base: u64,
    eof: bool,
}

const BUFFER: usize = 256 << 10;

impl<R: Read> Input<R> {
    fn new(source: R) -> Self {
        Input { source, buffer: vec![0; BUFFER], at: 0, end: 0, base: 0, eof: false }
    }

    /// Bytes consumed.
    fn offset(&self) -> u64 {
        self.base + self.at as u64
    }

    fn peek(&self) -> Option<u8> {
        (self.at < self.end).then(|| self.buffer[self.at])
    }

    /// Tries to have `count` (at most [`BUFFER`]) bytes buffered; fewer only at the end of the source.
    #[inline]
    fn ensure(&mut self, count: usize) -> Result<()> {
        if self.end - self.at >= count || self.eof { Ok(()) } else { self.refill(count) }
    }

    #[cold]
    fn refill(&mut self, count: usize) -> Result<()> {
        self.buffer.copy_within(self.at..self.end, 0);
        self.base += self.at as u64;
        self.end -= self.at;
        self.at = 0;
        while self.end < count {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(0) => {
                    self.eof = true;
                    break;
                }
                Ok(got) => self.end += got,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::failure(format!("cannot read on at byte {}", self.base + self.end as u64)).because(error)),
            }
        }
        Ok(())
    }
}

impl<R: Read> Read for Input<R> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        self.ensure(1).map_err(|error| std::io::Error::other(error.to_string()))?;
        let count = out.len().min(self.end - self.at);
        out[..count].copy_from_slice(&self.buffer[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

macro_rules! keys {
    ($($name:ident = $text:literal),* $(,)?) => {
        /// Keys and words with fixed string ids.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u32)]
        enum Key { $($name),* }
        const KEYS: &[&str] = &[$($text),*];
        const KEY_VALUES: &[Key] = &[$(Key::$name),*];
    };
}

keys! {
    Empty = "", Segments = "segments", DeviceTraces = "device_traces", Settings = "allocator_settings", Annotations = "external_annotations",
    HostSegments = "host_segments", HostTraces = "host_traces",
    Device = "device", Address = "address", TotalSize = "total_size", AllocatedSize = "allocated_size", ActiveSize = "active_size",
    RequestedSize = "requested_size", Stream = "stream", SegmentType = "segment_type", SegmentPoolId = "segment_pool_id",
    Expandable = "is_expandable", Frames = "frames", Blocks = "blocks", Size = "size", State = "state", History = "history",
    RealSize = "real_size", Addr = "addr", Action = "action", DeviceFree = "device_free", TimeUs = "time_us",
    CompileContext = "compile_context", UserMetadata = "user_metadata", InternalMetadata = "internal_metadata", PoolId = "pool_id",
    ForwardFrames = "forward_frames", Filename = "filename", Line = "line", Name = "name", Stage = "stage",
    Small = "small", Large = "large", ActiveAllocated = "active_allocated", ActivePendingFree = "active_pending_free",
    ActiveAwaitingFree = "active_awaiting_free", Inactive = "inactive", Alloc = "alloc", FreeRequested = "free_requested",
    FreeCompleted = "free_completed", SegmentAlloc = "segment_alloc", SegmentFree = "segment_free", SegmentMap = "segment_map",
    SegmentUnmap = "segment_unmap", Snapshot = "snapshot", Oom = "oom", Annotate = "annotate", Start = "START", End = "END",
}

impl Key {
    #[inline]
    fn of(id: StrId) -> Option<Key> {
        KEY_VALUES.get(id.0 as usize).copied()
    }
}

/// A value on the stack of the machine. Containers live in `Builder::objects`.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// Above `i64::MAX`.
    Unsigned(u64),
    Float(f64),
    Str(StrId),
    Object(u32),
}

/// No body yet.
const NO_BODY: u32 = u32::MAX;

/// A container. Bodies are slots of `Builder::bodies`; the other numbers are indexes of the typed arenas.
#[derive(Debug, Clone, Copy)]
enum Object {
    List(u32),
    Tuple(u32),
    /// Keys and values alternate in the body.
    Dict(u32),
    /// A pair of unsigned integers.
    Pool(u32),
    Entry(u32),
    Segment(u32),
    Block(u32),
    Frame(FrameId),
    Stack(StackId),
    /// A piece of a v0 block's history: only its stack is kept.
    History(StackId),
    Annotation(u32),
}

/// Turns containers into records of the model.
struct Builder {
    limits: Limits,
    used: u64,
    allowed: u64,
    objects: Vec<Object>,
    bodies: Vec<Vec<Value>>,
    free_bodies: Vec<u32>,
    entries: Vec<TraceEntry>,
    segments: Vec<Segment>,
    blocks: Vec<Block>,
    /// Whether the block at the same index carried an address.
    addressed: Vec<bool>,
    annotations: Vec<Annotation>,
    names: Names,
    pools: IndexSet<PoolId>,
    scratch: Vec<FrameId>,
    unknown: BTreeMap<String, u64>,
    history_seen: bool,
}

fn wrong(what: &str, expected: &str) -> Error {
    Error::failure(format!("{what} is not {expected}"))
        .hint("the file is no allocator snapshot, or a newer PyTorch changed the layout; record with torch.cuda.memory._dump_snapshot")
}

impl Builder {
    fn new(limits: Limits) -> Self {
        let mut names = Names::default();
        for text in KEYS {
            names.intern(text);
        }
        Builder {
            limits,
            used: 0,
            allowed: limits.base.min(limits.total),
            objects: Vec::new(),
            bodies: Vec::new(),
            free_bodies: Vec::new(),
            entries: Vec::new(),
            segments: Vec::new(),
            blocks: Vec::new(),
            addressed: Vec::new(),
            annotations: Vec::new(),
            names,
            pools: IndexSet::new(),
            scratch: Vec::new(),
            unknown: BTreeMap::new(),
            history_seen: false,
        }
    }

    /// Tells how many bytes of the file were read, which raises the allowance.
    #[inline]
    fn consumed(&mut self, offset: u64) {
        self.allowed = self.limits.base.saturating_add(self.limits.per_byte.saturating_mul(offset)).min(self.limits.total);
    }

    #[inline]
    fn charge(&mut self, bytes: u64) -> Result<()> {
        self.used = self.used.saturating_add(bytes);
        if self.used > self.allowed { Err(self.over()) } else { Ok(()) }
    }

    #[cold]
    fn over(&self) -> Error {
        Error::failure(format!("the file asks for more than the {} bytes of memory allowed at this point", self.allowed))
            .because("a snapshot needs a few bytes of memory for each byte of the file; this one is damaged or made to exhaust memory")
            .hint("record the snapshot again; if it is sound, raise the memory limit")
    }

    fn unknown(&mut self, what: &str) {
        if let Some(count) = self.unknown.get_mut(what) {
            *count += 1;
        } else if self.unknown.len() < 200 {
            self.unknown.insert(what.chars().take(200).collect(), 1);
        }
    }

    fn unknown_key(&mut self, of: &str, key: Value) {
        let text = match key {
            Value::Str(id) => format!("unknown key `{}` in {of}", self.names.text(id).chars().take(80).collect::<String>()),
            other => format!("unknown key {other:?} in {of}"),
        };
        self.unknown(&text);
    }

    #[inline]
    fn string(&mut self, text: &str) -> Result<Value> {
        let before = self.names.string_count();
        let id = self.names.intern(text);
        if self.names.string_count() != before {
            self.charge(text.len() as u64 + 64)?;
        }
        Ok(Value::Str(id))
    }

    #[inline]
    fn object(&mut self, object: Object) -> Result<Value> {
        self.charge(8)?;
        if self.objects.len() >= (u32::MAX - 1) as usize {
            return Err(Error::failure("the file holds more than 4 thousand million containers"));
        }
        self.objects.push(object);
        Ok(Value::Object((self.objects.len() - 1) as u32))
    }

    fn list(&mut self) -> Result<Value> {
        self.object(Object::List(NO_BODY))
    }

    fn dict(&mut self) -> Result<Value> {
        self.object(Object::Dict(NO_BODY))
    }

    fn tuple(&mut self, items: &[Value]) -> Result<Value> {
        if let [first, second] = items
            && let (Some(first), Some(second)) = (as_unsigned(*first), as_unsigned(*second))
        {
            let (at, new) = self.pools.insert_full((first, second));
            if new {
                self.charge(48)?;
            }
            return self.object(Object::Pool(at as u32));
        }
        let mut body = NO_BODY;
        self.extend_body(&mut body, items)?;
        self.object(Object::Tuple(body))
    }

    fn extend_body(&mut self, body: &mut u32, items: &[Value]) -> Result<()> {
        if items.is_empty() {
            return Ok(());
        }
        if *body == NO_BODY {
            *body = match self.free_bodies.pop() {
                Some(free) => free,
                None => {
                    self.charge(32)?;
                    self.bodies.push(Vec::new());
                    (self.bodies.len() - 1) as u32
                }
            };
        }
        let vector = &mut self.bodies[*body as usize];
        let before = vector.capacity();
        vector.extend_from_slice(items);
        let grown = vector.capacity() - before;
        if grown > 0 {
            self.charge(grown as u64 * 16)?;
        }
        Ok(())
    }

    fn release_body(&mut self, body: u32) {
        if body == NO_BODY {
            return;
        }
        let vector = &mut self.bodies[body as usize];
        vector.clear();
        if vector.capacity() > 4096 {
            self.used = self.used.saturating_sub(vector.capacity() as u64 * 16);
            *vector = Vec::new();
        }
        self.free_bodies.push(body);
    }

    fn body(&self, body: u32) -> &[Value] {
        if body == NO_BODY { &[] } else { &self.bodies[body as usize] }
    }

    /// Appends to a list.
    fn append(&mut self, list: Value, items: &[Value]) -> Result<()> {
        let Value::Object(at) = list else { return Err(wrong("what is appended to", "a list")) };
        match self.objects[at as usize] {
            Object::List(mut body) => {
                self.extend_body(&mut body, items)?;
                self.objects[at as usize] = Object::List(body);
                Ok(())
            }
            Object::Stack(StackId::EMPTY) => {
                let mut body = NO_BODY;
                self.extend_body(&mut body, items)?;
                self.objects[at as usize] = Object::List(body);
                Ok(())
            }
            Object::Stack(_) => Err(Error::failure("a list of frames changes after it was used")),
            _ => Err(wrong("what is appended to", "a list")),
        }
    }

    /// Sets items of a dict; keys and values alternate.
    fn set_items(&mut self, dict: Value, items: &[Value]) -> Result<()> {
        let Value::Object(at) = dict else { return Err(wrong("what items are set in", "a dict")) };
        match self.objects[at as usize] {
            Object::Dict(mut body) => {
                // All earlier items together with the new ones decide what this dict is.
                if body == NO_BODY {
                    if let Some(typed) = self.recognise(items)? {
                        self.objects[at as usize] = typed;
                        return Ok(());
                    }
                    self.extend_body(&mut body, items)?;
                } else {
                    self.extend_body(&mut body, items)?;
                    let all = std::mem::take(&mut self.bodies[body as usize]);
                    // Only when the new items bring the telling key: otherwise a dict of n single items would be looked at n times.
                    let typed = if items.chunks_exact(2).any(|pair| telling(pair[0]).is_some()) { self.recognise(&all) } else { Ok(None) };
                    self.bodies[body as usize] = all;
                    if let Some(typed) = typed? {
                        self.release_body(body);
                        self.objects[at as usize] = typed;
                        return Ok(());
                    }
                }
                self.objects[at as usize] = Object::Dict(body);
                Ok(())
            }
            Object::Entry(index) => self.fill_entry(index as usize, items),
            Object::Segment(index) => self.fill_segment(index as usize, items),
            Object::Block(index) => self.fill_block(index as usize, items),
            Object::Annotation(index) => self.fill_annotation(index as usize, items),
            Object::Frame(_) | Object::History(_) => Err(Error::failure("a frame changes after it was complete")),
            _ => Err(wrong("what items are set in", "a dict")),
        }
    }

    /// The record that a dict with these items is, if it is one.
    fn recognise(&mut self, items: &[Value]) -> Result<Option<Object>> {
        let Some(kind) = items.chunks_exact(2).find_map(|pair| telling(pair[0])) else { return Ok(None) };
        Ok(Some(match kind {
            Key::Action => {
                self.charge(size_of::<TraceEntry>() as u64 * 2)?;
                self.entries.push(TraceEntry::new(Action::Other, 0, 0, 0));
                let index = self.entries.len() - 1;
                self.fill_entry(index, items)?;
                Object::Entry(index as u32)
            }
            Key::Blocks => {
                self.charge(size_of::<Segment>() as u64 * 2)?;
                self.segments.push(Segment {
                    device: 0,
                    address: 0,
                    total_size: 0,
                    allocated_size: 0,
                    active_size: 0,
                    requested_size: 0,
                    stream: 0,
                    class: SizeClass::Large,
                    pool_id: (0, 0),
                    expandable: false,
                    stack: StackId::EMPTY,
                    blocks: Vec::new(),
                });
                let index = self.segments.len() - 1;
                self.fill_segment(index, items)?;
                Object::Segment(index as u32)
            }
            Key::State | Key::History => {
                self.charge(size_of::<Block>() as u64 * 2 + 1)?;
                self.blocks.push(Block { address: 0, size: 0, requested_size: 0, state: BlockState::Inactive, stack: StackId::EMPTY });
                self.addressed.push(false);
                let index = self.blocks.len() - 1;
                self.fill_block(index, items)?;
                Object::Block(index as u32)
            }
            Key::Stage => {
                self.charge(size_of::<Annotation>() as u64 * 2)?;
                self.annotations.push(Annotation { stage: Stage::Other, name: StrId::EMPTY, device: -1, time_us: TraceEntry::NO_TIME });
                let index = self.annotations.len() - 1;
                self.fill_annotation(index, items)?;
                Object::Annotation(index as u32)
            }
            Key::RealSize => {
                let mut stack = StackId::EMPTY;
                for pair in items.chunks_exact(2) {
                    match key_of(pair[0]) {
                        Some(Key::Frames) => stack = self.stack(pair[1])?,
                        Some(Key::Addr | Key::RealSize) => {}
                        _ => self.unknown_key("a block's history", pair[0]),
                    }
                }
                Object::History(stack)
            }
            _ => {
                let mut frame = Frame { name: StrId::EMPTY, file: StrId::EMPTY, line: 0 };
                for pair in items.chunks_exact(2) {
                    match (key_of(pair[0]), pair[1]) {
                        (Some(Key::Name), Value::Str(name)) => frame.name = name,
                        (Some(Key::Filename), Value::Str(file)) => frame.file = file,
                        (Some(Key::Name | Key::Filename), Value::None) => {}
                        (Some(Key::Name), _) => return Err(wrong("`name` of a frame", "a string")),
                        (Some(Key::Filename), _) => return Err(wrong("`filename` of a frame", "a string")),
                        (Some(Key::Line), value) => frame.line = as_unsigned(value).map_or(0, |line| u32::try_from(line).unwrap_or(0)),
                        _ => self.unknown_key("a frame", pair[0]),
                    }
                }
                let before = self.names.frame_count();
                let id = self.names.intern_frame(frame);
                if self.names.frame_count() != before {
                    self.charge(48)?;
                }
                Object::Frame(id)
            }
        }))
    }

    fn fill_entry(&mut self, index: usize, items: &[Value]) -> Result<()> {
        let mut entry = self.entries[index];
        let mut device_free = None;
        for pair in items.chunks_exact(2) {
            let (key, value) = (pair[0], pair[1]);
            match key_of(key) {
                Some(Key::Action) => {
                    let Value::Str(word) = value else { return Err(wrong("`action` of a trace entry", "a string")) };
                    entry.action = match Key::of(word) {
                        Some(Key::Alloc) => Action::Alloc,
                        Some(Key::FreeRequested) => Action::FreeRequested,
                        Some(Key::FreeCompleted) => Action::FreeCompleted,
                        Some(Key::SegmentAlloc) => Action::SegmentAlloc,
                        Some(Key::SegmentFree) => Action::SegmentFree,
                        Some(Key::SegmentMap) => Action::SegmentMap,
                        Some(Key::SegmentUnmap) => Action::SegmentUnmap,
                        Some(Key::Snapshot) => Action::Snapshot,
                        Some(Key::Oom) => Action::Oom,
                        Some(Key::Annotate) => Action::Annotate,
                        _ => {
                            let text = format!("unknown action `{}`", self.names.text(word).chars().take(80).collect::<String>());
                            self.unknown(&text);
                            Action::Other
                        }
                    };
                }
                Some(Key::Addr) => entry.addr = pointer(value, "`addr` of a trace entry")?,
                Some(Key::DeviceFree) => device_free = Some(pointer(value, "`device_free` of a trace entry")?),
                Some(Key::Size) => entry.size = unsigned(value, "`size` of a trace entry")?,
                Some(Key::Stream) => entry.stream = pointer(value, "`stream` of a trace entry")?,
                Some(Key::TimeUs) => {
                    let Value::Int(time) = value else { return Err(wrong("`time_us` of a trace entry", "an integer")) };
                    entry.time_us = time;
                }
                Some(Key::Frames) => entry.stack = self.stack(value)?,
                Some(Key::ForwardFrames) => entry.forward_stack = self.forward(value)?,
                Some(Key::PoolId | Key::SegmentPoolId) => {
                    let pool = self.pool(value)?;
                    entry.pool = self.pools.insert_full(pool).0 as u32;
                }
                Some(Key::CompileContext) => entry.compile_context = self.words(value)?,
                Some(Key::UserMetadata) => entry.user_metadata = self.words(value)?,
                Some(Key::InternalMetadata) => entry.internal_metadata = self.words(value)?,
                // Some versions name the device inside the entry; the position in `device_traces` says the same.
                Some(Key::Device) => {}
                _ => self.unknown_key("a trace entry", key),
            }
        }
        if let Some(free) = device_free {
            entry.addr = free;
        }
        self.entries[index] = entry;
        Ok(())
    }

    fn fill_segment(&mut self, index: usize, items: &[Value]) -> Result<()> {
        for pair in items.chunks_exact(2) {
            let (key, value) = (pair[0], pair[1]);
            match key_of(key) {
                Some(Key::Device) => {
                    let device = as_unsigned(value).and_then(|device| u32::try_from(device).ok());
                    let device = device.filter(|device| *device < 1 << 16);
                    self.segments[index].device = device.ok_or_else(|| wrong("`device` of a segment", "a device number"))?;
                }
                Some(Key::Address) => self.segments[index].address = pointer(value, "`address` of a segment")?,
                Some(Key::TotalSize) => self.segments[index].total_size = unsigned(value, "`total_size` of a segment")?,
                Some(Key::AllocatedSize) => self.segments[index].allocated_size = unsigned(value, "`allocated_size` of a segment")?,
                Some(Key::ActiveSize) => self.segments[index].active_size = unsigned(value, "`active_size` of a segment")?,
                Some(Key::RequestedSize) => self.segments[index].requested_size = unsigned(value, "`requested_size` of a segment")?,
                Some(Key::Stream) => self.segments[index].stream = pointer(value, "`stream` of a segment")?,
                Some(Key::SegmentType) => {
                    let Value::Str(word) = value else { return Err(wrong("`segment_type`", "a string")) };
                    self.segments[index].class = match Key::of(word) {
                        Some(Key::Small) => SizeClass::Small,
                        Some(Key::Large) => SizeClass::Large,
                        _ => return Err(wrong("`segment_type`", "`small` or `large`")),
                    };
                }
                Some(Key::SegmentPoolId | Key::PoolId) => self.segments[index].pool_id = self.pool(value)?,
                Some(Key::Expandable) => {
                    self.segments[index].expandable = match value {
                        Value::Bool(on) => on,
                        Value::Int(number) => number != 0,
                        _ => return Err(wrong("`is_expandable`", "True or False")),
                    };
                }
                Some(Key::Frames) => self.segments[index].stack = self.stack(value)?,
                Some(Key::Blocks) => {
                    let items = self.items(value, "`blocks` of a segment")?;
                    self.charge(items.len() as u64 * size_of::<Block>() as u64)?;
                    let mut blocks = Vec::with_capacity(items.len());
                    let mut bare = 0;
                    for item in &items {
                        let Some(Object::Block(block)) = self.get(*item) else { return Err(wrong("an item of `blocks`", "a block")) };
                        bare += usize::from(!self.addressed[block as usize]);
                        blocks.push(self.blocks[block as usize]);
                    }
                    if bare != 0 && bare != blocks.len() {
                        return Err(Error::failure("some blocks of a segment have an address and some have none"));
                    }
                    self.segments[index].blocks = blocks;
                }
                _ => self.unknown_key("a segment", key),
            }
        }
        // Without addresses (torch 2.0) the blocks follow one another from the start of the segment.
        let segment = &mut self.segments[index];
        if segment.address != 0 && segment.blocks.first().is_some_and(|block| block.address == 0) {
            let mut address = segment.address;
            for block in &mut segment.blocks {
                block.address = address;
                address = address.checked_add(block.size).ok_or_else(|| wrong("the sum of block sizes", "an address"))?;
            }
        }
        Ok(())
    }

    fn fill_block(&mut self, index: usize, items: &[Value]) -> Result<()> {
        let mut block = self.blocks[index];
        for pair in items.chunks_exact(2) {
            let (key, value) = (pair[0], pair[1]);
            match key_of(key) {
                Some(Key::Address) => {
                    block.address = pointer(value, "`address` of a block")?;
                    self.addressed[index] = true;
                }
                Some(Key::Size) => block.size = unsigned(value, "`size` of a block")?,
                Some(Key::RequestedSize) => block.requested_size = unsigned(value, "`requested_size` of a block")?,
                Some(Key::State) => {
                    let Value::Str(word) = value else { return Err(wrong("`state` of a block", "a string")) };
                    block.state = match Key::of(word) {
                        Some(Key::ActiveAllocated) => BlockState::ActiveAllocated,
                        Some(Key::ActivePendingFree | Key::ActiveAwaitingFree) => BlockState::ActivePendingFree,
                        Some(Key::Inactive) => BlockState::Inactive,
                        _ => {
                            return Err(wrong(
                                &format!("`state` of a block (`{}`)", self.names.text(word).chars().take(80).collect::<String>()),
                                "`active_allocated`, `active_pending_free` or `inactive`",
                            ));
                        }
                    };
                }
                Some(Key::Frames) => block.stack = self.stack(value)?,
                Some(Key::History) => {
                    self.history_seen = true;
                    // Newest first: the first piece tells of the present allocation.
                    let items = self.items(value, "`history` of a block")?;
                    block.stack = match items.first() {
                        None => StackId::EMPTY,
                        Some(first) => match self.get(*first) {
                            Some(Object::History(stack)) => stack,
                            _ => return Err(wrong("an item of `history`", "a dict with `real_size`")),
                        },
                    };
                }
                _ => self.unknown_key("a block", key),
            }
        }
        self.blocks[index] = block;
        Ok(())
    }

    fn fill_annotation(&mut self, index: usize, items: &[Value]) -> Result<()> {
        let mut annotation = self.annotations[index];
        for pair in items.chunks_exact(2) {
            let (key, value) = (pair[0], pair[1]);
            match key_of(key) {
                Some(Key::Stage) => {
                    annotation.stage = match value {
                        Value::Str(word) if Key::of(word) == Some(Key::Start) => Stage::Start,
                        Value::Str(word) if Key::of(word) == Some(Key::End) => Stage::End,
                        _ => Stage::Other,
                    };
                }
                Some(Key::Name) => annotation.name = self.words(value)?,
                Some(Key::Device) => annotation.device = if let Value::Int(device) = value { device } else { -1 },
                Some(Key::TimeUs) => annotation.time_us = if let Value::Int(time) = value { time } else { TraceEntry::NO_TIME },
                _ => self.unknown_key("an annotation", key),
            }
        }
        self.annotations[index] = annotation;
        Ok(())
    }

    fn get(&self, value: Value) -> Option<Object> {
        match value {
            Value::Object(at) => self.objects.get(at as usize).copied(),
            _ => None,
        }
    }

    /// A copy of the items of a list or tuple. Charged, so that one long list named by many records stays within the budget.
    fn items(&mut self, value: Value, what: &str) -> Result<Vec<Value>> {
        let body = match self.get(value) {
            Some(Object::List(body) | Object::Tuple(body)) => body,
            Some(Object::Stack(StackId::EMPTY)) => NO_BODY,
            _ => return Err(wrong(what, "a list")),
        };
        let count = self.body(body).len() as u64;
        // The copy goes away again at once; its work does not, so a quarter of it stays charged.
        self.charge(count * 4)?;
        Ok(self.body(body).to_vec())
    }

    /// The stack that a value of `frames` is.
    fn stack(&mut self, value: Value) -> Result<StackId> {
        if value == Value::None {
            return Ok(StackId::EMPTY);
        }
        let (Value::Object(at), Some(object)) = (value, self.get(value)) else { return Err(wrong("`frames`", "a list")) };
        let body = match object {
            Object::Stack(stack) => return Ok(stack),
            Object::List(body) => body,
            Object::Tuple(NO_BODY) => return Ok(StackId::EMPTY),
            _ => return Err(wrong("`frames`", "a list")),
        };
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        for item in self.body(body) {
            let Some(Object::Frame(frame)) = self.get(*item) else { return Err(wrong("an item of `frames`", "a frame")) };
            scratch.push(frame);
        }
        let before = self.names.stack_count();
        let stack = self.names.intern_stack(&scratch);
        if self.names.stack_count() != before {
            self.charge(scratch.len() as u64 * 8 + 32)?;
        }
        self.scratch = scratch;
        self.release_body(body);
        self.objects[at as usize] = Object::Stack(stack);
        Ok(stack)
    }

    /// `forward_frames`: frames as elsewhere, or lines of text.
    fn forward(&mut self, value: Value) -> Result<StackId> {
        let lines = match self.get(value) {
            Some(Object::List(body)) if matches!(self.body(body).first(), Some(Value::Str(_))) => self.items(value, "`forward_frames`")?,
            _ => return self.stack(value),
        };
        let mut frames = Vec::with_capacity(lines.len());
        for line in lines {
            let Value::Str(name) = line else { return Err(wrong("an item of `forward_frames`", "a line of text")) };
            frames.push(self.names.intern_frame(Frame { name, file: StrId::EMPTY, line: 0 }));
        }
        self.charge(frames.len() as u64 * 48)?;
        let stack = self.names.intern_stack(&frames);
        if let Value::Object(at) = value {
            self.objects[at as usize] = Object::Stack(stack);
        }
        Ok(stack)
    }

    fn pool(&mut self, value: Value) -> Result<PoolId> {
        match self.get(value) {
            Some(Object::Pool(at)) => Ok(self.pools.get_index(at as usize).copied().unwrap_or((0, 0))),
            Some(Object::List(body)) => match *self.body(body) {
                [first, second] => as_unsigned(first).zip(as_unsigned(second)).ok_or_else(|| wrong("a pool id", "a pair of numbers")),
                _ => Err(wrong("a pool id", "a pair of numbers")),
            },
            _ => Err(wrong("a pool id", "a pair of numbers")),
        }
    }

    /// A string; anything else as short text.
    fn words(&mut self, value: Value) -> Result<StrId> {
        match value {
            Value::Str(id) => Ok(id),
            Value::None => Ok(StrId::EMPTY),
            other => {
                let mut room = 16;
                let text: String = self.to_json(other, 3, 64, &mut room).to_string().chars().take(256).collect();
                match self.string(&text)? {
                    Value::Str(id) => Ok(id),
                    _ => Ok(StrId::EMPTY),
                }
            }
        }
    }

    /// A generic value as JSON, at most `depth` levels and `room` values; what goes beyond becomes `"…"`.
    fn to_json(&self, value: Value, depth: u32, longest: usize, room: &mut usize) -> serde_json::Value {
        use serde_json::Value as Json;
        if *room == 0 {
            return "…".into();
        }
        *room -= 1;
        match value {
            Value::None => Json::Null,
            Value::Bool(on) => on.into(),
            Value::Int(number) => number.into(),
            Value::Unsigned(number) => number.into(),
            Value::Float(number) => number.into(),
            Value::Str(id) => {
                let text = self.names.text(id);
                if text.len() > longest { format!("{}…", text.chars().take(longest / 4).collect::<String>()).into() } else { text.into() }
            }
            Value::Object(_) if depth == 0 => "…".into(),
            Value::Object(at) => match self.objects[at as usize] {
                Object::List(body) | Object::Tuple(body) => {
                    let mut array = Vec::new();
                    for item in self.body(body) {
                        if *room == 0 {
                            break;
                        }
                        array.push(self.to_json(*item, depth - 1, longest, room));
                    }
                    Json::Array(array)
                }
                Object::Dict(body) => {
                    let mut map = serde_json::Map::new();
                    for pair in self.body(body).chunks_exact(2) {
                        if *room == 0 {
                            break;
                        }
                        let key = match self.to_json(pair[0], 0, longest, room) {
                            Json::String(text) => text,
                            other => other.to_string(),
                        };
                        map.insert(key, self.to_json(pair[1], depth - 1, longest, room));
                    }
                    Json::Object(map)
                }
                Object::Pool(at) => self.pools.get_index(at as usize).map_or(Json::Null, |pool| serde_json::json!([pool.0, pool.1])),
                _ => "…".into(),
            },
        }
    }

    fn settings(&mut self, value: Value) -> Result<Option<Settings>> {
        if value == Value::None {
            return Ok(None);
        }
        if !matches!(self.get(value), Some(Object::Dict(_))) {
            return Err(wrong("`allocator_settings`", "a dict"));
        }
        let mut room = 10_000;
        let serde_json::Value::Object(raw) = self.to_json(value, 6, 4096, &mut room) else { return Ok(None) };
        let text = |key: &str| raw.get(key).and_then(|value| value.as_str()).map(str::to_string);
        let conf = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"]
            .iter()
            .find_map(|key| text(key))
            .unwrap_or_default();
        let max_split_size = raw.get("max_split_size").and_then(serde_json::Value::as_u64).filter(|size| *size < i64::MAX as u64);
        let mut roundup_power2_divisions = Vec::new();
        if let Some(table) = raw.get("roundup_power2_divisions").and_then(|value| value.as_object()) {
            for (start, divisions) in table {
                match (start.parse(), divisions.as_u64()) {
                    (Ok(start), Some(divisions)) => roundup_power2_divisions.push((start, divisions)),
                    _ => self.unknown("unreadable interval in `roundup_power2_divisions`"),
                }
            }
        }
        Ok(Some(Settings {
            conf,
            max_split_size,
            garbage_collection_threshold: raw.get("garbage_collection_threshold").and_then(serde_json::Value::as_f64).unwrap_or(0.0),
            expandable_segments: raw.get("expandable_segments").and_then(serde_json::Value::as_bool).unwrap_or(false),
            roundup_power2_divisions,
            raw,
        }))
    }

    /// Takes the segments out of the arena in the order of the list.
    fn take_segments(&mut self, value: Value) -> Result<Vec<Segment>> {
        let items = self.items(value, "`segments`")?;
        let mut order = Vec::with_capacity(items.len());
        for item in items {
            let Some(Object::Segment(at)) = self.get(item) else { return Err(wrong("an item of `segments`", "a segment")) };
            order.push(at as usize);
        }
        if order.iter().copied().eq(0..self.segments.len()) {
            return Ok(std::mem::take(&mut self.segments));
        }
        let mut out = Vec::with_capacity(order.len());
        for at in order {
            self.charge(size_of::<Segment>() as u64 + self.segments[at].blocks.len() as u64 * size_of::<Block>() as u64)?;
            out.push(self.segments[at].clone());
        }
        Ok(out)
    }

    fn finish(mut self, top: Value, bytes_read: u64) -> Result<Snapshot> {
        let mut snapshot = Snapshot::empty(Generation::V1);
        let mut generation = Generation::V1;
        let body = match self.get(top) {
            Some(Object::Dict(body)) => self.body(body).to_vec(),
            // `torch.cuda.memory_snapshot()` gives the bare list of segments.
            Some(Object::List(_)) => vec![Value::Str(StrId(Key::Segments as u32)), top],
            _ => return Err(wrong("the content of the file", "a snapshot (a dict with `segments` and `device_traces`)")),
        };
        let mut found = false;
        for pair in body.chunks_exact(2) {
            let (key, value) = (pair[0], pair[1]);
            match key_of(key) {
                Some(Key::Segments) => {
                    found = true;
                    snapshot.segments = self.take_segments(value)?;
                }
                Some(Key::DeviceTraces) => {
                    snapshot.traces = self.take_traces(value)?;
                }
                Some(Key::Settings) => {
                    generation = generation.max(Generation::V2);
                    snapshot.settings = self.settings(value)?;
                }
                Some(Key::Annotations) => {
                    generation = generation.max(Generation::V3);
                    for item in self.items(value, "`external_annotations`")? {
                        let Some(Object::Annotation(at)) = self.get(item) else {
                            return Err(wrong("an item of `external_annotations`", "an annotation"));
                        };
                        self.charge(size_of::<Annotation>() as u64)?;
                        snapshot.annotations.push(self.annotations[at as usize]);
                    }
                }
                Some(Key::HostSegments | Key::HostTraces) => {
                    generation = Generation::V4;
                    let items = self.items(value, "host segments or traces")?;
                    for item in items {
                        snapshot.host_items += match self.get(item) {
                            Some(Object::List(body)) => self.body(body).len() as u64,
                            _ => 1,
                        };
                    }
                }
                _ => {
                    let mut room = 40;
                    let shown = self.to_json(value, 2, 256, &mut room).to_string();
                    let shown: String =
                        if shown.chars().count() > 120 { shown.chars().take(120).chain("…".chars()).collect() } else { shown };
                    let name = match key {
                        Value::Str(id) => self.names.text(id).chars().take(80).collect(),
                        other => format!("{other:?}"),
                    };
                    self.unknown(&format!("unknown key `{name}` at the top, kept here: {shown}"));
                }
            }
        }
        if !found {
            return Err(Error::failure("the file has no `segments`, so it is no allocator snapshot")
                .hint("a snapshot is written by torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")"));
        }
        let blocks = snapshot.segments.iter().any(|segment| !segment.blocks.is_empty());
        let bare = generation == Generation::V1 && blocks && !self.addressed.contains(&true);
        if self.history_seen || bare {
            generation = Generation::V0;
        }
        snapshot.generation = generation;
        snapshot.names = self.names;
        snapshot.pools = self.pools;
        snapshot.bytes_read = bytes_read;
        snapshot.warnings =
            self.unknown.into_iter().map(|(text, count)| if count == 1 { text } else { format!("{text} ({count} times)") }).collect();
        if snapshot.host_items > 0 {
            snapshot.warnings.push(format!("{} items of the host allocator are counted but not interpreted", snapshot.host_items));
        }
        Ok(snapshot)
    }

    fn take_traces(&mut self, value: Value) -> Result<Vec<Vec<TraceEntry>>> {
        let lists = self.items(value, "`device_traces`")?;
        if lists.len() > 1 << 16 {
            return Err(wrong("`device_traces`", "a list with one item a device"));
        }
        // In every file that PyTorch writes the entries stand in the order of the lists: then the arena is cut, not copied.
        let mut next = 0_usize;
        let mut sizes = Vec::with_capacity(lists.len());
        let mut in_order = true;
        for list in &lists {
            let body = match self.get(*list) {
                Some(Object::List(body)) => body,
                Some(Object::Stack(StackId::EMPTY)) => NO_BODY,
                _ => return Err(wrong("an item of `device_traces`", "a list")),
            };
            let start = next;
            for item in self.body(body) {
                let Some(Object::Entry(at)) = self.get(*item) else { return Err(wrong("an item of `device_traces`", "a trace entry")) };
                in_order &= at as usize == next;
                next += 1;
            }
            sizes.push(next - start);
        }
        if in_order {
            let mut rest = std::mem::take(&mut self.entries);
            rest.truncate(next);
            let mut traces = Vec::with_capacity(sizes.len());
            for size in sizes.iter().rev() {
                let at = rest.len() - size;
                traces.push(if at == 0 { std::mem::take(&mut rest) } else { rest.split_off(at) });
            }
            traces.reverse();
            return Ok(traces);
        }
        let mut traces = Vec::with_capacity(lists.len());
        for list in lists {
            let items = self.items(list, "an item of `device_traces`")?;
            self.charge(items.len() as u64 * size_of::<TraceEntry>() as u64)?;
            let mut trace = Vec::with_capacity(items.len());
            for item in items {
                let Some(Object::Entry(at)) = self.get(item) else { return Err(wrong("an item of `device_traces`", "a trace entry")) };
                trace.push(self.entries[at as usize]);
            }
            traces.push(trace);
        }
        Ok(traces)
    }
}

#[inline]
fn key_of(value: Value) -> Option<Key> {
    match value {
        Value::Str(id) => Key::of(id),
        _ => None,
    }
}

/// The keys of which one alone tells what record a dict is.
fn telling(key: Value) -> Option<Key> {
    key_of(key)
        .filter(|key| matches!(key, Key::Action | Key::Blocks | Key::State | Key::History | Key::Stage | Key::RealSize | Key::Filename))
}

fn as_unsigned(value: Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(number).ok(),
        Value::Unsigned(number) => Some(number),
        _ => None,
    }
}

fn unsigned(value: Value, what: &str) -> Result<u64> {
    as_unsigned(value).ok_or_else(|| wrong(what, "a number of bytes"))
}

/// Addresses and streams: pointers that some writers give as signed numbers.
fn pointer(value: Value, what: &str) -> Result<u64> {
    match value {
        Value::Int(number) => Ok(number as u64),
        Value::Unsigned(number) => Ok(number),
        _ => Err(wrong(what, "an address")),
    }
}
