//! The pickle machine: a closed set of opcodes that can only build plain data. Nothing is ever looked up or called.

use std::collections::HashMap;
use std::io::Read;

use super::{Builder, Input, Limits, Value};
use crate::error::{Error, Result};
use crate::gpu::trace::model::Snapshot;

/// Names of all opcodes of the pickle language, for messages about the refused ones.
fn name(op: u8) -> Option<&'static str> {
    Some(match op {
        b'(' => "MARK",
        b'.' => "STOP",
        b'0' => "POP",
        b'1' => "POP_MARK",
        b'2' => "DUP",
        b'F' => "FLOAT",
        b'I' => "INT",
        b'J' => "BININT",
        b'K' => "BININT1",
        b'L' => "LONG",
        b'M' => "BININT2",
        b'N' => "NONE",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        b'R' => "REDUCE",
        b'S' => "STRING",
        b'T' => "BINSTRING",
        b'U' => "SHORT_BINSTRING",
        b'V' => "UNICODE",
        b'X' => "BINUNICODE",
        b'a' => "APPEND",
        b'b' => "BUILD",
        b'c' => "GLOBAL",
        b'd' => "DICT",
        b'e' => "APPENDS",
        b'g' => "GET",
        b'h' => "BINGET",
        b'i' => "INST",
        b'j' => "LONG_BINGET",
        b'l' => "LIST",
        b'o' => "OBJ",
        b'p' => "PUT",
        b'q' => "BINPUT",
        b'r' => "LONG_BINPUT",
        b's' => "SETITEM",
        b't' => "TUPLE",
        b'u' => "SETITEMS",
        b'}' => "EMPTY_DICT",
        b']' => "EMPTY_LIST",
        b')' => "EMPTY_TUPLE",
        b'G' => "BINFLOAT",
        0x80 => "PROTO",
        0x81 => "NEWOBJ",
        0x82 => "EXT1",
        0x83 => "EXT2",
        0x84 => "EXT4",
        0x85 => "TUPLE1",
        0x86 => "TUPLE2",
        0x87 => "TUPLE3",
        0x88 => "NEWTRUE",
        0x89 => "NEWFALSE",
        0x8a => "LONG1",
        0x8b => "LONG4",
        b'B' => "BINBYTES",
        b'C' => "SHORT_BINBYTES",
        0x8c => "SHORT_BINUNICODE",
        0x8d => "BINUNICODE8",
        0x8e => "BINBYTES8",
        0x8f => "EMPTY_SET",
        0x90 => "ADDITEMS",
        0x91 => "FROZENSET",
        0x92 => "NEWOBJ_EX",
        0x93 => "STACK_GLOBAL",
        0x94 => "MEMOIZE",
        0x95 => "FRAME",
        0x96 => "BYTEARRAY8",
        0x97 => "NEXT_BUFFER",
        0x98 => "READONLY_BUFFER",
        _ => return None,
    })
}

/// Bytes that the longest fixed operand plus its opcode take.
const AHEAD: usize = 16;

struct Machine<R> {
    input: Input<R>,
    builder: Builder,
    stack: Vec<Value>,
    /// Stack heights at the open MARKs.
    marks: Vec<usize>,
    memo: Vec<Value>,
    /// Memo slots that a writer numbered out of order.
    sparse: HashMap<u32, Value>,
    text: Vec<u8>,
}

/// Reads a pickle; the input stands at its first byte.
pub(super) fn read<R: Read>(input: Input<R>, limits: Limits) -> Result<Snapshot> {
    let mut machine = Machine {
        input,
        builder: Builder::new(limits),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        sparse: HashMap::new(),
        text: Vec::new(),
    };
    let top = machine.run()?;
    let offset = machine.input.offset();
    machine.builder.finish(top, offset)
}

impl<R: Read> Machine<R> {
    fn run(&mut self) -> Result<Value> {
        loop {
            self.input.ensure(AHEAD)?;
            let start = self.input.offset();
            let Some(op) = self.input.peek() else {
                return Err(cut(start, "before its end (no STOP)"));
            };
            self.input.at += 1;
            match self.step(op) {
                Ok(None) => {}
                Ok(Some(top)) => return Ok(top),
                Err(error) => {
                    let shown = name(op).map_or_else(|| format!("0x{op:02x}"), str::to_string);
                    let place = format!("at byte {start}, opcode `{shown}`");
                    // The message keeps what is wrong in front; the place follows as a cause.
                    return Err(if error.message().contains("at byte") { error } else { error.because(place) });
                }
            }
        }
    }

    #[inline]
    fn step(&mut self, op: u8) -> Result<Option<Value>> {
        match op {
            b'h' => {
                let index = u32::from(self.fixed::<1>()?[0]);
                self.recall(index)?;
            }
            b'j' => {
                let index = u32::from_le_bytes(self.fixed::<4>()?);
                self.recall(index)?;
            }
            0x94 => {
                let index = self.memo.len() as u32;
                self.remember(index)?;
            }
            b'q' => {
                let index = u32::from(self.fixed::<1>()?[0]);
                self.remember(index)?;
            }
            b'r' => {
                let index = u32::from_le_bytes(self.fixed::<4>()?);
                self.remember(index)?;
            }
            b'K' => {
                let value = i64::from(self.fixed::<1>()?[0]);
                self.push(Value::Int(value))?;
            }
            b'M' => {
                let value = i64::from(u16::from_le_bytes(self.fixed::<2>()?));
                self.push(Value::Int(value))?;
            }
            b'J' => {
                let value = i64::from(i32::from_le_bytes(self.fixed::<4>()?));
                self.push(Value::Int(value))?;
            }
            0x8a => {
                let length = usize::from(self.fixed::<1>()?[0]);
                self.long(length as u64)?;
            }
            0x8b => {
                let length = i32::from_le_bytes(self.fixed::<4>()?);
                let length = u64::try_from(length).map_err(|_| Error::failure("an integer has a negative length"))?;
                self.long(length)?;
            }
            b'G' => {
                let value = f64::from_be_bytes(self.fixed::<8>()?);
                self.push(Value::Float(value))?;
            }
            b'N' => self.push(Value::None)?,
            0x88 => self.push(Value::Bool(true))?,
            0x89 => self.push(Value::Bool(false))?,
            0x8c => {
                let length = u64::from(self.fixed::<1>()?[0]);
                self.unicode(length)?;
            }
            b'X' => {
                let length = u64::from(u32::from_le_bytes(self.fixed::<4>()?));
                self.unicode(length)?;
            }
            0x8d => {
                let length = u64::from_le_bytes(self.fixed::<8>()?);
                self.unicode(length)?;
            }
            b'(' => {
                if self.marks.len() == self.marks.capacity() {
                    self.allowance();
                    self.builder.charge(self.marks.len() as u64 * 8 + 64)?;
                }
                self.marks.push(self.stack.len());
            }
            b'}' => {
                let dict = self.builder.dict()?;
                self.push(dict)?;
            }
            b']' => {
                let list = self.builder.list()?;
                self.push(list)?;
            }
            b'u' => {
                let mark = self.mark()?;
                if !(self.stack.len() - mark).is_multiple_of(2) {
                    return Err(Error::failure("a dict has a key without value"));
                }
                let dict = self.below(mark)?;
                self.allowance();
                self.builder.set_items(dict, &self.stack[mark..])?;
                self.stack.truncate(mark);
            }
            b's' => {
                let at = self.stack.len().checked_sub(2).ok_or_else(underflow)?;
                let dict = self.below(at)?;
                self.allowance();
                self.builder.set_items(dict, &self.stack[at..])?;
                self.stack.truncate(at);
            }
            b'e' => {
                let mark = self.mark()?;
                let list = self.below(mark)?;
                self.allowance();
                self.builder.append(list, &self.stack[mark..])?;
                self.stack.truncate(mark);
            }
            b'a' => {
                let at = self.stack.len().checked_sub(1).ok_or_else(underflow)?;
                let list = self.below(at)?;
                self.allowance();
                self.builder.append(list, &self.stack[at..])?;
                self.stack.truncate(at);
            }
            b')' => self.tuple(self.stack.len())?,
            0x85..=0x87 => {
                let at = self.stack.len().checked_sub(usize::from(op - 0x84)).ok_or_else(underflow)?;
                if self.marks.last().is_some_and(|mark| *mark > at) {
                    return Err(underflow());
                }
                self.tuple(at)?;
            }
            b't' => {
                let mark = self.mark()?;
                self.tuple(mark)?;
            }
            0x80 => {
                let version = self.fixed::<1>()?[0];
                if !(2..=5).contains(&version) {
                    return Err(Error::failure(format!("pickle protocol {version} is not supported (2 to 5 are)"))
                        .hint("write it again with protocol 4: pickle.dump(pickle.load(open(FILE, 'rb')), open(NEW, 'wb'), protocol=4)"));
                }
            }
            // Frames only help readers to prefetch; the length is a hint about the following opcodes.
            0x95 => {
                self.fixed::<8>()?;
            }
            b'.' => {
                if !self.marks.is_empty() || self.stack.len() != 1 {
                    return Err(Error::failure(format!("the pickle stops with {} values left instead of one", self.stack.len())));
                }
                return Ok(self.stack.pop());
            }
            other => return Err(refused(other)),
        }
        Ok(None)
    }

    /// Raises the builder's allowance to what was read.
    #[inline]
    fn allowance(&mut self) {
        self.builder.consumed(self.input.offset());
    }

    /// The next `N` bytes.
    #[inline]
    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        // `run` made at least AHEAD bytes available where the file has them.
        match self.input.buffer[self.input.at..self.input.end].first_chunk::<N>() {
            Some(bytes) => {
                self.input.at += N;
                Ok(*bytes)
            }
            None => Err(cut(self.input.base + self.input.end as u64, "in the middle of an opcode")),
        }
    }

    #[inline]
    fn push(&mut self, value: Value) -> Result<()> {
        if self.stack.len() == self.stack.capacity() {
            self.allowance();
            self.builder.charge(self.stack.len() as u64 * 16 + 256)?;
        }
        self.stack.push(value);
        Ok(())
    }

    #[inline]
    fn recall(&mut self, index: u32) -> Result<()> {
        let value = match self.memo.get(index as usize) {
            Some(value) => *value,
            None => match self.sparse.get(&index) {
                Some(value) => *value,
                None => return Err(Error::failure(format!("memo slot {index} is read before it is written"))),
            },
        };
        self.push(value)
    }

    #[inline]
    fn remember(&mut self, index: u32) -> Result<()> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let value = *self.stack[floor..].last().ok_or_else(underflow)?;
        let at = index as usize;
        if at < self.memo.len() {
            self.memo[at] = value;
        } else if at == self.memo.len() {
            if self.memo.len() == self.memo.capacity() {
                self.allowance();
                self.builder.charge(self.memo.len() as u64 * 16 + 256)?;
            }
            self.memo.push(value);
        } else {
            self.allowance();
            self.builder.charge(64)?;
            self.sparse.insert(index, value);
        }
        Ok(())
    }

    #[inline]
    fn mark(&mut self) -> Result<usize> {
        self.marks.pop().ok_or_else(|| Error::failure("an opcode needs a MARK and there is none"))
    }

    /// The value under stack position `at`, which must not lie under an open mark.
    #[inline]
    fn below(&self, at: usize) -> Result<Value> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if at <= floor {
            return Err(underflow());
        }
        Ok(self.stack[at - 1])
    }

    fn tuple(&mut self, at: usize) -> Result<()> {
        self.allowance();
        let tuple = self.builder.tuple(&self.stack[at..])?;
        self.stack.truncate(at);
        self.push(tuple)
    }

    /// A little-endian two's complement integer of `length` bytes.
    fn long(&mut self, length: u64) -> Result<()> {
        if length > 9 {
            return Err(Error::failure(format!("an integer of {length} bytes does not fit into 64 bits")));
        }
        let length = length as usize;
        let bytes = &self.input.buffer[self.input.at..self.input.end];
        let Some(bytes) = bytes.get(..length) else {
            return Err(cut(self.input.base + self.input.end as u64, "in the middle of an integer"));
        };
        let mut wide = [if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xFF } else { 0 }; 16];
        wide[..length].copy_from_slice(bytes);
        self.input.at += length;
        let number = i128::from_le_bytes(wide);
        let value = match (i64::try_from(number), u64::try_from(number)) {
            (Ok(number), _) => Value::Int(number),
            (_, Ok(number)) => Value::Unsigned(number),
            _ => return Err(Error::failure(format!("the integer {number} does not fit into 64 bits"))),
        };
        self.push(value)
    }

    /// A UTF-8 string of `length` bytes.
    fn unicode(&mut self, length: u64) -> Result<()> {
        if length > self.builder.limits.string {
            return Err(Error::failure(format!(
                "a string of {length} bytes is longer than the limit of {} bytes",
                self.builder.limits.string
            ))
            .hint("the file is damaged, or not written by torch.cuda.memory._dump_snapshot"));
        }
        let length = length as usize;
        self.input.ensure(length.min(super::BUFFER))?;
        let value = if length <= self.input.end - self.input.at {
            let bytes = &self.input.buffer[self.input.at..self.input.at + length];
            self.builder.consumed(self.input.base + (self.input.at + length) as u64);
            let text = text(bytes);
            let value = self.builder.string(&text)?;
            self.input.at += length;
            value
        } else {
            // Longer than the buffer, or the file ends: gather what really comes, never trusting the length.
            self.text.clear();
            while self.text.len() < length {
                self.input.ensure(1)?;
                let count = (length - self.text.len()).min(self.input.end - self.input.at);
                if count == 0 {
                    return Err(cut(self.input.offset(), "in the middle of a string"));
                }
                self.text.extend_from_slice(&self.input.buffer[self.input.at..self.input.at + count]);
                self.input.at += count;
            }
            self.builder.consumed(self.input.offset());
            let gathered = std::mem::take(&mut self.text);
            let text = text(&gathered);
            let value = self.builder.string(&text)?;
            drop(text);
            self.text = gathered;
            value
        };
        self.push(value)
    }
}

/// Strings with lone surrogates (`surrogatepass`) are no UTF-8: such bytes become the replacement character.
fn text(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

#[cold]
fn underflow() -> Error {
    Error::failure("an opcode needs more values than there are")
}

#[cold]
fn cut(offset: u64, place: &str) -> Error {
    Error::failure(format!("the file ends at byte {offset}, {place}")).hint("it was cut short: copy it again, or record the snapshot again")
}

#[cold]
fn refused(op: u8) -> Error {
    match name(op) {
        Some(known) => Error::failure(format!("opcode `{known}` is not allowed"))
            .because("a snapshot is plain data; this opcode would let the file call code or hold something else than numbers, texts, lists and dicts")
            .hint("do not load this file with Python either, unless you trust who made it; record with torch.cuda.memory._dump_snapshot"),
        None => Error::failure(format!("byte 0x{op:02x} is no pickle opcode")).hint("the file is damaged or no pickle"),
    }
}
