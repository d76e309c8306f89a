//! The JSON form: the same dict, written by `json.dump`. Tuples are lists there.

use std::cell::RefCell;
use std::fmt;
use std::io::Read;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::{Builder, Input, Limits, Value};
use crate::error::{Error, Result};
use crate::gpu::trace::model::Snapshot;

/// Values gathered before they are handed to the builder, as pickle writers do.
const BATCH: usize = 1000;

struct Counting<'a, R> {
    input: Input<R>,
    offset: &'a RefCell<u64>,
}

impl<R: Read> Read for Counting<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let count = self.input.read(out)?;
        *self.offset.borrow_mut() = self.input.offset();
        Ok(count)
    }
}

/// Reads JSON; the input stands at its first byte.
pub(super) fn read<R: Read>(mut input: Input<R>, limits: Limits) -> Result<Snapshot> {
    input.ensure(3)?;
    if input.buffer[input.at..input.end].starts_with(&[0xEF, 0xBB, 0xBF]) {
        input.at += 3;
    }
    let offset = RefCell::new(0);
    let builder = RefCell::new(Builder::new(limits));
    let reader = std::io::BufReader::with_capacity(64 << 10, Counting { input, offset: &offset });
    let mut json = serde_json::Deserializer::from_reader(reader);
    let seed = Seed { builder: &builder, offset: &offset };
    let top = seed.deserialize(&mut json).and_then(|top| json.end().map(|()| top)).map_err(|error| {
        let made = Error::failure("the file is no sound JSON snapshot").because(&error);
        if error.is_eof() {
            made.hint("it was cut short: copy it again, or record the snapshot again")
        } else {
            made.hint("write it with json.dump(torch.cuda.memory._snapshot(), file)")
        }
    })?;
    let bytes = *offset.borrow();
    builder.into_inner().finish(top, bytes)
}

#[derive(Clone, Copy)]
struct Seed<'a> {
    builder: &'a RefCell<Builder>,
    offset: &'a RefCell<u64>,
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Seed<'_> {
    fn with<E: serde::de::Error, T>(&self, work: impl FnOnce(&mut Builder) -> Result<T>) -> std::result::Result<T, E> {
        let mut builder = self.builder.borrow_mut();
        builder.consumed(*self.offset.borrow());
        work(&mut builder).map_err(E::custom)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a part of an allocator snapshot")
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::None)
    }

    fn visit_bool<E>(self, on: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(on))
    }

    fn visit_i64<E>(self, number: i64) -> std::result::Result<Value, E> {
        Ok(Value::Int(number))
    }

    fn visit_u64<E>(self, number: u64) -> std::result::Result<Value, E> {
        Ok(i64::try_from(number).map_or(Value::Unsigned(number), Value::Int))
    }

    fn visit_f64<E>(self, number: f64) -> std::result::Result<Value, E> {
        Ok(Value::Float(number))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Value, E> {
        self.with(|builder| {
            if text.len() as u64 > builder.limits.string {
                return Err(Error::failure(format!(
                    "a string of {} bytes is longer than the limit of {} bytes",
                    text.len(),
                    builder.limits.string
                )));
            }
            builder.string(text)
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> std::result::Result<Value, A::Error> {
        let list = self.with(Builder::list)?;
        let mut batch = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            batch.push(item);
            if batch.len() == BATCH {
                self.with(|builder| builder.append(list, &batch))?;
                batch.clear();
            }
        }
        self.with(|builder| builder.append(list, &batch))?;
        Ok(list)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> std::result::Result<Value, A::Error> {
        let dict = self.with(Builder::dict)?;
        let mut batch = Vec::new();
        while let Some(key) = items.next_key_seed(self)? {
            let value = items.next_value_seed(self)?;
            batch.push(key);
            batch.push(value);
            if batch.len() == BATCH {
                self.with(|builder| builder.set_items(dict, &batch))?;
                batch.clear();
            }
        }
        if !batch.len().is_multiple_of(2) {
            return Err(A::Error::custom("a dict has a key without value"));
        }
        self.with(|builder| builder.set_items(dict, &batch))?;
        Ok(dict)
    }
}
