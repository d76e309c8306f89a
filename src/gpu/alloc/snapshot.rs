//! The allocator's state in the layout of `torch.cuda.memory._snapshot()`: values, JSON, and a pickle that PyTorch's
//! `memory_viz` opens.
//!
//! The pickle is made of plain dictionaries, lists, tuples, strings and numbers (protocol 4, no frames of the framing
//! kind, no globals), and the same state always gives the same bytes.

use std::collections::HashMap;

use serde::Serialize;

use super::block::BlockState;
use super::core::{DeviceAllocator, PoolId};
use super::history::Action;
use crate::gpu::driver::Driver;

/// A stack frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Frame {
    pub name: String,
    pub filename: String,
    pub line: u64,
}

/// A block of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SnapshotBlock {
    pub address: u64,
    pub size: u64,
    /// Stale while inactive.
    pub requested_size: u64,
    pub state: BlockState,
    pub frames: Vec<Frame>,
}

/// A segment of a snapshot: a driver allocation, or a contiguous mapped range of an expandable segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SnapshotSegment {
    pub device: u32,
    pub address: u64,
    pub total_size: u64,
    pub allocated_size: u64,
    pub active_size: u64,
    pub requested_size: u64,
    pub stream: u64,
    /// `"small"` or `"large"`.
    pub segment_type: &'static str,
    pub segment_pool_id: PoolId,
    pub is_expandable: bool,
    pub frames: Vec<Frame>,
    pub blocks: Vec<SnapshotBlock>,
}

/// An entry of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SnapshotEvent {
    pub action: Action,
    /// Address; free bytes of the device for `oom` (under the key `device_free` in the pickle and in JSON).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_free: Option<u64>,
    pub size: u64,
    pub stream: u64,
    pub time_us: u64,
    pub pool_id: PoolId,
    pub frames: Vec<Frame>,
}

/// The settings part.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SnapshotSettings {
    #[serde(rename = "PYTORCH_CUDA_ALLOC_CONF")]
    pub conf: String,
    /// -1: unlimited.
    pub max_split_size: i64,
    pub garbage_collection_threshold: f64,
    pub expandable_segments: bool,
    pub pinned_num_register_threads: u64,
    pub release_lock_on_cudamalloc: bool,
    pub pinned_use_cuda_host_register: bool,
    pub graph_capture_record_stream_reuse: bool,
    /// Divisions by the start of the interval in MiB.
    pub roundup_power2_divisions: serde_json::Map<String, serde_json::Value>,
}

/// The whole state.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Snapshot {
    /// By ascending address.
    pub segments: Vec<SnapshotSegment>,
    /// One list a device; those before this allocator's device are empty.
    pub device_traces: Vec<Vec<SnapshotEvent>>,
    pub allocator_settings: SnapshotSettings,
    pub external_annotations: Vec<serde_json::Value>,
}

impl Snapshot {
    /// The pickle, as `torch.cuda.memory._dump_snapshot` would write it.
    pub fn to_pickle(&self) -> Vec<u8> {
        let value = serde_json::to_value(self).unwrap_or_default();
        pickle(&value)
    }

    /// JSON with the same layout.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl<D: Driver> DeviceAllocator<D> {
    /// The state now, without stack frames. Notes itself in the trace, as PyTorch does.
    pub fn snapshot(&mut self) -> Snapshot {
        self.snapshot_with(&|_| Vec::new())
    }

    /// The state now, with stack frames made from tags.
    pub fn snapshot_with(&mut self, frames: &dyn Fn(u64) -> Vec<Frame>) -> Snapshot {
        self.note_snapshot();
        let mut segments = Vec::new();
        for segment in self.segments() {
            let fresh = |address| SnapshotSegment {
                device: self.device(),
                address,
                total_size: 0,
                allocated_size: 0,
                active_size: 0,
                requested_size: 0,
                stream: segment.stream.0,
                segment_type: if segment.small { "small" } else { "large" },
                segment_pool_id: segment.pool,
                is_expandable: segment.expandable,
                frames: frames(segment.tag),
                blocks: Vec::new(),
            };
            let mut open: Option<SnapshotSegment> = None;
            for block in self.blocks_of(segment.id) {
                if block.state == BlockState::Unmapped {
                    segments.extend(open.take());
                    continue;
                }
                let part = open.get_or_insert_with(|| fresh(block.address));
                part.total_size += block.size;
                let active = block.state != BlockState::Free;
                if active {
                    part.active_size += block.size;
                    part.requested_size += block.requested;
                }
                if block.state == BlockState::Allocated {
                    part.allocated_size += block.size;
                }
                part.blocks.push(SnapshotBlock {
                    address: block.address,
                    size: block.size,
                    requested_size: block.requested,
                    state: block.state,
                    frames: if active { frames(block.tag) } else { Vec::new() },
                });
            }
            segments.extend(open.take());
        }
        segments.sort_by_key(|segment| segment.address);
        let events = self
            .history()
            .map(|entry| {
                let oom = entry.action == Action::Oom;
                SnapshotEvent {
                    action: entry.action,
                    addr: (!oom).then_some(entry.addr),
                    device_free: oom.then_some(entry.addr),
                    size: entry.size,
                    stream: entry.stream,
                    time_us: entry.time_us,
                    pool_id: entry.pool,
                    frames: frames(entry.tag),
                }
            })
            .collect();
        let mut device_traces = vec![Vec::new(); self.device() as usize];
        device_traces.push(events);
        let config = self.config();
        Snapshot {
            segments,
            device_traces,
            allocator_settings: SnapshotSettings {
                conf: config.to_string(),
                max_split_size: self.raw_stats().max_split_size,
                garbage_collection_threshold: config.garbage_collection_threshold,
                expandable_segments: config.expandable_segments,
                pinned_num_register_threads: config.pinned.num_register_threads,
                release_lock_on_cudamalloc: config.release_lock_on_cudamalloc,
                pinned_use_cuda_host_register: config.pinned.use_cuda_host_register,
                graph_capture_record_stream_reuse: config.graph_capture_record_stream_reuse,
                roundup_power2_divisions: (0..)
                    .zip(config.roundup_power2_divisions)
                    .map(|(at, d)| ((1u64 << at).to_string(), d.into()))
                    .collect(),
            },
            external_annotations: Vec::new(),
        }
    }
}

/// Pickles a JSON value. Arrays under the keys of pool ids become tuples.
fn pickle(value: &serde_json::Value) -> Vec<u8> {
    let mut writer = Pickler { out: vec![0x80, 4], memo: HashMap::new() };
    writer.value(value, false);
    writer.out.push(b'.');
    writer.out
}

struct Pickler<'a> {
    out: Vec<u8>,
    memo: HashMap<&'a str, u32>,
}

impl<'a> Pickler<'a> {
    fn value(&mut self, value: &'a serde_json::Value, tuple: bool) {
        use serde_json::Value;
        match value {
            Value::Null => self.out.push(b'N'),
            Value::Bool(true) => self.out.push(0x88),
            Value::Bool(false) => self.out.push(0x89),
            Value::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(n), _) => self.unsigned(n),
                (None, Some(n)) => self.negative(n),
                _ => {
                    self.out.push(b'G');
                    self.out.extend(number.as_f64().unwrap_or(0.0).to_be_bytes());
                }
            },
            Value::String(text) => self.text(text),
            Value::Array(items) if tuple && items.len() == 2 => {
                items.iter().for_each(|item| self.value(item, false));
                self.out.push(0x86);
            }
            Value::Array(items) => {
                self.out.push(b']');
                if !items.is_empty() {
                    self.out.push(b'(');
                    items.iter().for_each(|item| self.value(item, false));
                    self.out.push(b'e');
                }
            }
            Value::Object(fields) => {
                self.out.push(b'}');
                if !fields.is_empty() {
                    self.out.push(b'(');
                    for (key, field) in fields {
                        self.text(key);
                        self.value(field, matches!(key.as_str(), "segment_pool_id" | "pool_id"));
                    }
                    self.out.push(b'u');
                }
            }
        }
    }

    fn unsigned(&mut self, n: u64) {
        match n {
            0..=0xFF => self.out.extend([b'K', n as u8]),
            0x100..=0xFFFF => {
                self.out.push(b'M');
                self.out.extend((n as u16).to_le_bytes());
            }
            0x1_0000..=0x7FFF_FFFF => {
                self.out.push(b'J');
                self.out.extend((n as i32).to_le_bytes());
            }
            _ => {
                // Little-endian two's complement of least length: a leading 1 bit needs one more byte.
                let bytes = n.to_le_bytes();
                let len = (64 - n.leading_zeros()) as usize / 8 + 1;
                self.out.extend([0x8A, len as u8]);
                self.out.extend(bytes.iter().chain([&0]).take(len));
            }
        }
    }

    fn negative(&mut self, n: i64) {
        match i32::try_from(n) {
            Ok(n) => {
                self.out.push(b'J');
                self.out.extend(n.to_le_bytes());
            }
            Err(_) => {
                self.out.extend([0x8A, 8]);
                self.out.extend(n.to_le_bytes());
            }
        }
    }

    fn text(&mut self, text: &'a str) {
        if let Some(&at) = self.memo.get(text) {
            match u8::try_from(at) {
                Ok(at) => self.out.extend([b'h', at]),
                Err(_) => {
                    self.out.push(b'j');
                    self.out.extend(at.to_le_bytes());
                }
            }
            return;
        }
        match u8::try_from(text.len()) {
            Ok(len) => self.out.extend([0x8C, len]),
            Err(_) => {
                self.out.push(b'X');
                self.out.extend((text.len() as u32).to_le_bytes());
            }
        }
        self.out.extend(text.as_bytes());
        self.out.push(0x94);
        self.memo.insert(text, self.memo.len() as u32);
    }
}
