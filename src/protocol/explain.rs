//! Says what is wrong with a request that could not be decoded: the field, and what it must be. The errors of the decoders
//! name positions and types of this program instead, which do not help the people who write clients.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{
        self, DeserializeOwned, DeserializeSeed, EnumAccess, Error as _, IgnoredAny,
        IntoDeserializer as _, MapAccess, SeqAccess, Unexpected, VariantAccess, Visitor,
        value::StrDeserializer,
    },
    forward_to_deserialize_any,
};

/// The levels of a value that are kept. No request has so many.
const DEPTH_MAX: usize = 16;

/// Any value of JSON or MessagePack.
pub(crate) enum Value {
    Null,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
    /// A word of a path or a query, which also stands for the number or the truth that it names.
    Word(String),
    Bytes(Vec<u8>),
    List(Vec<Self>),
    Map(Vec<(Self, Self)>),
    /// A value that no request has: an extension of MessagePack, or what is below the kept levels.
    Other,
}

impl Value {
    /// Returns what is wrong with this value as a `T`. `None` if nothing is.
    pub(crate) fn explain<T: DeserializeOwned>(&self, is_text: bool) -> Option<String> {
        self.read::<T>(is_text).err().map(|wrong| wrong.to_string())
    }

    pub(super) fn read<T: DeserializeOwned>(&self, is_text: bool) -> Result<T, Wrong> {
        self.read_as(PhantomData::<T>, is_text)
    }

    pub(super) fn read_as<'de, S: DeserializeSeed<'de>>(
        &self,
        seed: S,
        is_text: bool,
    ) -> Result<S::Value, Wrong> {
        seed.deserialize(Decoded {
            value: self,
            is_text,
        })
    }

    pub(super) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        AnyValue(DEPTH_MAX).deserialize(deserializer)
    }
}

/// Reads a value with so many levels.
#[derive(Clone, Copy)]
struct AnyValue(usize);

impl<'de> DeserializeSeed<'de> for AnyValue {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        match self.0 {
            0 => deserializer
                .deserialize_ignored_any(IgnoredAny)
                .map(|_| Value::Other),
            _ => deserializer.deserialize_any(self),
        }
    }
}

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Unsigned(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Signed(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_bytes<E>(self, value: &[u8]) -> Result<Value, E> {
        Ok(Value::Bytes(value.to_owned()))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, _: D) -> Result<Value, D::Error> {
        Ok(Value::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let below = Self(self.0 - 1);
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(below)? {
            list.push(item);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let below = Self(self.0 - 1);
        let mut map = Vec::new();
        while let Some(entry) = entries.next_entry_seed(below, below)? {
            map.push(entry);
        }
        Ok(Value::Map(map))
    }
}

/// Says what is wrong with a value that is no `T`.
pub(super) fn explained<T: DeserializeOwned>(value: &Value, is_text: bool) -> String {
    let text = value.explain::<T>(is_text);
    text.map_or_else(|| "it cannot be decoded".into(), |text| truncated(&text))
}

/// Shortens an error text, which may quote the client's input.
pub(super) fn truncated(text: &str) -> String {
    const CHARS: usize = 200;
    match text.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The field that is wrong, and what it must be.
#[derive(Debug)]
pub(super) struct Wrong {
    field: String,
    text: String,
}

impl Wrong {
    fn new(text: impl Into<String>) -> Self {
        let (field, text) = (String::new(), text.into());
        Self { field, text }
    }

    fn below(mut self, name: &str) -> Self {
        let is_plain = self.field.is_empty() || self.field.starts_with('[');
        let dot = if is_plain { "" } else { "." };
        self.field = format!("{name}{dot}{}", self.field);
        self
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, text } = self;
        match field.as_str() {
            "" => f.write_str(text),
            field => write!(f, "{field}: {text}"),
        }
    }
}

impl std::error::Error for Wrong {}

impl de::Error for Wrong {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self::new(text.to_string())
    }

    fn invalid_type(_: Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        Self::new(format!("must be {}", in_words(&wanted.to_string())))
    }

    fn invalid_value(is: Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        Self::invalid_type(is, wanted)
    }

    fn invalid_length(_: usize, wanted: &dyn de::Expected) -> Self {
        Self::new(format!("must be {}", in_words(&wanted.to_string())))
    }

    fn unknown_variant(_: &str, wanted: &'static [&'static str]) -> Self {
        Self::new(format!("must be one of {}", wanted.join(", ")))
    }

    fn unknown_field(field: &str, wanted: &'static [&'static str]) -> Self {
        let text = format!("there is no such field, only {}", wanted.join(", "));
        Self::new(text).below(field)
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new("is missing").below(field)
    }

    fn duplicate_field(field: &'static str) -> Self {
        Self::new("is given twice").below(field)
    }
}

/// Returns words for a type that is described in words of this program.
fn in_words(wanted: &str) -> &str {
    let begins = |begin: &str| wanted.starts_with(begin);
    match wanted {
        "a boolean" => "true or false",
        "a string" | "string" | "a borrowed string" => "a text",
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, at least 0",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "unit" => "null",
        _ if begins("a sequence") || begins("an array") || begins("a tuple") => "a list",
        "string or map" => "a text",
        _ if begins("tuple struct") => "a list of numbers",
        _ if begins("struct") || begins("a map") || begins("map") => "an object",
        _ if begins("enum") || begins("internally tagged") => "an object with a type",
        _ => wanted,
    }
}

/// A value that is decoded.
#[derive(Clone, Copy)]
struct Decoded<'a> {
    value: &'a Value,
    /// Whether ids are text, as in JSON.
    is_text: bool,
}

impl<'a> Decoded<'a> {
    fn at(self, value: &'a Value) -> Self {
        Self { value, ..self }
    }
}

impl<'de> Deserializer<'de> for Decoded<'_> {
    type Error = Wrong;

    fn is_human_readable(&self) -> bool {
        self.is_text
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Unsigned(value) => visitor.visit_u64(*value),
            Value::Signed(value) => visitor.visit_i64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(text) | Value::Word(text) => visitor.visit_str(text),
            Value::Bytes(bytes) => visitor.visit_bytes(bytes),
            Value::List(items) => visitor.visit_seq(Items {
                items,
                read: 0,
                decoded: self,
            }),
            Value::Map(entries) => visitor.visit_map(Entries {
                entries,
                value: None,
                decoded: self,
            }),
            Value::Other => Err(Wrong::invalid_type(Unexpected::Other("value"), &visitor)),
        }
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.value {
            Value::Word(word) => match word.parse() {
                Ok(number) => visitor.visit_u64(number),
                Err(_) => Err(Wrong::invalid_type(Unexpected::Str(word), &visitor)),
            },
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.value {
            Value::Word(word) => match word.parse() {
                Ok(truth) => visitor.visit_bool(truth),
                Err(_) => Err(Wrong::invalid_type(Unexpected::Str(word), &visitor)),
            },
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.value {
            // The visitor would take them as a text.
            Value::Bytes(bytes) => Err(Wrong::invalid_type(Unexpected::Bytes(bytes), &visitor)),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        self.deserialize_str(visitor)
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.value {
            Value::Text(text) => visitor.visit_str(text),
            // The visitor would take a number as the place of a field.
            _ => Err(Wrong::new("must be a text")),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_unit()
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        self.deserialize_map(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.value {
            // The visitor would take its items as the fields.
            Value::List(_) => Err(Wrong::invalid_type(Unexpected::Seq, &visitor)),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        match self.value {
            Value::Text(text) | Value::Word(text) => {
                let text: StrDeserializer<'_, Wrong> = text.as_str().into_deserializer();
                visitor.visit_enum(text)
            }
            Value::Map(entries) if entries.len() == 1 => visitor.visit_enum(Variant {
                entry: &entries[0],
                decoded: self,
            }),
            _ => Err(Wrong::new(format!(
                "must be one of {}",
                variants.join(", ")
            ))),
        }
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u32 u128 f32 f64 char bytes byte_buf unit unit_struct seq tuple tuple_struct
    }
}

struct Items<'a> {
    items: &'a [Value],
    read: usize,
    decoded: Decoded<'a>,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = Wrong;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Wrong> {
        let Some(item) = self.items.get(self.read) else {
            return Ok(None);
        };
        let at = format!("[{}]", self.read);
        self.read += 1;
        let read = seed.deserialize(self.decoded.at(item));
        read.map(Some).map_err(|wrong| wrong.below(&at))
    }
}

struct Entries<'a> {
    entries: &'a [(Value, Value)],
    value: Option<&'a (Value, Value)>,
    decoded: Decoded<'a>,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = Wrong;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Wrong> {
        let Some((entry, rest)) = self.entries.split_first() else {
            return Ok(None);
        };
        (self.entries, self.value) = (rest, Some(entry));
        let key = seed.deserialize(self.decoded.at(&entry.0));
        key.map(Some).map_err(|wrong| match wrong.field.is_empty() {
            true => wrong.below("(key)"),
            // There is no such field.
            false => wrong,
        })
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Wrong> {
        let Some((key, value)) = self.value.take() else {
            return Err(Wrong::new("must have a value"));
        };
        let name = match key {
            Value::Text(text) => text,
            _ => "a value",
        };
        let read = seed.deserialize(self.decoded.at(value));
        read.map_err(|wrong| wrong.below(name))
    }
}

/// A variant with content, as an object with one field.
struct Variant<'a> {
    entry: &'a (Value, Value),
    decoded: Decoded<'a>,
}

impl<'de> EnumAccess<'de> for Variant<'_> {
    type Error = Wrong;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Wrong> {
        let name = seed.deserialize(self.decoded.at(&self.entry.0))?;
        Ok((name, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_> {
    type Error = Wrong;

    fn unit_variant(self) -> Result<(), Wrong> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Wrong> {
        seed.deserialize(self.decoded.at(&self.entry.1))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Wrong> {
        self.decoded.at(&self.entry.1).deserialize_any(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        self.decoded.at(&self.entry.1).deserialize_any(visitor)
    }
}
