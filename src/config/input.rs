//! Reads values of settings as the type that is wanted. A variable of the environment is only a text, and the wanted type
//! decides what it means: a text setting takes it as it is, and a number setting parses it.
//!
//! Errors say what is wanted and never what is there, because that may be a secret.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{
    Deserializer,
    de::{
        self, DeserializeSeed, IntoDeserializer as _, MapAccess, SeqAccess, Unexpected, Visitor,
        value::StrDeserializer,
    },
    forward_to_deserialize_any,
};

/// A setting, or a section of settings, with its source.
#[derive(Clone)]
pub(super) struct Node {
    pub(super) origin: String,
    pub(super) content: Content,
}

#[derive(Clone)]
pub(super) enum Content {
    /// From the environment.
    Text(String),
    Toml(toml::Value),
    Section(Section),
}

#[derive(Clone, Default)]
pub(super) struct Section(pub(super) BTreeMap<String, Node>);

impl Section {
    fn entries(&self) -> impl Iterator<Item = (&str, Input<'_>)> {
        self.0.iter().map(|(key, node)| {
            let input = match &node.content {
                Content::Text(text) => Input::Text(text),
                Content::Toml(value) => Input::Toml(value),
                Content::Section(section) => Input::Section(section),
            };
            (key.as_str(), input)
        })
    }
}

/// A value of the file or the environment.
#[derive(Clone, Copy)]
pub(super) enum Input<'a> {
    /// A value of the environment.
    Text(&'a str),
    Toml(&'a toml::Value),
    Section(&'a Section),
}

/// The reason why a setting has no value of its type.
#[derive(Debug)]
pub(super) struct Wrong {
    /// The name of the setting.
    pub(super) key: String,
    pub(super) text: String,
}

/// The longest name of a setting that is shown, and its digits. A secret in hexadecimal has more of them.
const NAME_BYTES_MAX: usize = 40;
const NAME_DIGITS_MAX: usize = 4;

/// Returns the name of a setting for an error. What is hardly a name may be a secret at the wrong place.
pub(super) fn shown(name: &str) -> &str {
    let in_names = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    let digits = name.bytes().filter(u8::is_ascii_digit).count();
    let is_name = (1..=NAME_BYTES_MAX).contains(&name.len())
        && digits <= NAME_DIGITS_MAX
        && name.bytes().all(in_names);
    if is_name { name } else { HIDDEN }
}

/// What is shown instead of such a name.
const HIDDEN: &str = "(a key that is not shown)";

impl Wrong {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self {
            key: String::new(),
            text: text.into(),
        }
    }

    /// Adds the name of the table in which the error occurred.
    fn below(mut self, name: &str) -> Self {
        let dot = if self.key.is_empty() || self.key.starts_with('[') {
            ""
        } else {
            "."
        };
        self.key = format!("{name}{dot}{}", self.key);
        self
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.text)
    }
}

impl std::error::Error for Wrong {}

impl de::Error for Wrong {
    fn custom<T: fmt::Display>(text: T) -> Self {
        let text = text.to_string();
        Self::new(match text.as_str() {
            "invalid socket address syntax" => {
                "must be an IP address and a port, such as 127.0.0.1:8080"
            }
            "invalid IP address syntax" => "must be a network, such as 10.0.0.0/8",
            // Another text of a library may quote the value.
            _ => "cannot be read",
        })
    }

    fn invalid_type(_: Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        Self::new(format!("must be {wanted}"))
    }

    fn invalid_value(_: Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        Self::new(format!("must be {wanted}"))
    }

    fn unknown_variant(_: &str, wanted: &'static [&'static str]) -> Self {
        Self::new(format!("must be one of {}", wanted.join(", ")))
    }

    fn unknown_field(field: &str, wanted: &'static [&'static str]) -> Self {
        let text = format!("there is no such setting, only {}", wanted.join(", "));
        Self::new(text).below(shown(field))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new("is missing").below(field)
    }
}

impl Input<'_> {
    fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Toml(value) => value.as_str(),
            Self::Section(_) => None,
        }
    }

    fn number<T: TryFrom<i64> + FromStr + fmt::Display>(&self, max: Option<T>) -> Result<T, Wrong> {
        let number = match self {
            Self::Text(text) => text.trim().parse().ok(),
            Self::Toml(value) => value.as_integer().and_then(|value| value.try_into().ok()),
            Self::Section(_) => None,
        };
        number.ok_or_else(|| {
            Wrong::new(match max {
                Some(max) => format!("must be a whole number from 0 to {max}"),
                None => "must be a whole number, at least 0".into(),
            })
        })
    }
}

/// Parses a text of the environment that is a list or a table in the form of TOML.
fn parsed(text: &str) -> Option<toml::Value> {
    let mut table: toml::Table = toml::from_str(&format!("value = {text}")).ok()?;
    table.remove("value")
}

/// Takes quotation marks off an item of a list.
fn unquoted(item: &str) -> &str {
    let within = |mark| item.strip_prefix(mark)?.strip_suffix(mark);
    within('"').or_else(|| within('\'')).unwrap_or(item)
}

macro_rules! numbers {
    ($($method:ident $visit:ident $max:expr;)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
            visitor.$visit(self.number($max)?)
        })*
    };
}

impl<'de> Deserializer<'de> for Input<'_> {
    type Error = Wrong;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self {
            Self::Toml(toml::Value::Array(_)) => self.deserialize_seq(visitor),
            Self::Toml(toml::Value::Table(_)) | Self::Section(_) => self.deserialize_map(visitor),
            _ => self.deserialize_str(visitor),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        let value = match self {
            Self::Text(text) => text.trim().parse().ok(),
            Self::Toml(value) => value.as_bool(),
            Self::Section(_) => None,
        };
        visitor.visit_bool(value.ok_or_else(|| Wrong::new("must be true or false"))?)
    }

    numbers! {
        deserialize_u8 visit_u8 Some(u8::MAX);
        deserialize_u16 visit_u16 Some(u16::MAX);
        deserialize_u32 visit_u32 Some(u32::MAX);
        deserialize_u64 visit_u64 None;
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        let hint = match self {
            Self::Toml(toml::Value::Array(_)) => "not a list",
            Self::Toml(toml::Value::Table(_)) | Self::Section(_) => "not a table",
            Self::Toml(_) | Self::Text(_) => "in quotation marks",
        };
        match self.text() {
            Some(text) => visitor.visit_str(text),
            None => Err(Wrong::new(format!("must be a text, {hint}"))),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_some(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self {
            Self::Toml(toml::Value::Array(items)) => {
                visitor.visit_seq(Items::new(items.iter().map(Input::Toml)))
            }
            Self::Text(text) => match parsed(text) {
                Some(value) if value.is_array() => Input::Toml(&value).deserialize_seq(visitor),
                _ => {
                    let text = text.trim();
                    let inner = text.strip_prefix('[').and_then(|t| t.strip_suffix(']'));
                    let items = inner.unwrap_or(text).split(',').map(str::trim);
                    let items = items.filter(|item| !item.is_empty()).map(unquoted);
                    visitor.visit_seq(Items::new(items.map(Input::Text)))
                }
            },
            _ => Err(Wrong::new("must be a list, such as [\"a\", \"b\"]")),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        let wrong = || Wrong::new("must be a table, such as { name = \"value\" }");
        match self {
            Self::Section(section) => visitor.visit_map(Entries::new(section.entries())),
            Self::Toml(toml::Value::Table(table)) => {
                let entries = table.iter();
                let entries = entries.map(|(key, value)| (key.as_str(), Input::Toml(value)));
                visitor.visit_map(Entries::new(entries))
            }
            Self::Text(text) => match parsed(text) {
                Some(value) if value.is_table() => Input::Toml(&value).deserialize_map(visitor),
                _ => Err(wrong()),
            },
            Self::Toml(_) => Err(wrong()),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        self.deserialize_map(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        let Some(text) = self.text() else {
            return Err(de::Error::unknown_variant("", variants));
        };
        let text: StrDeserializer<'_, Wrong> = text.into_deserializer();
        visitor.visit_enum(text)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 f32 f64 char bytes byte_buf unit unit_struct tuple tuple_struct identifier ignored_any
    }
}

struct Items<I> {
    items: I,
    read: usize,
}

impl<I> Items<I> {
    fn new(items: I) -> Self {
        Self { items, read: 0 }
    }
}

impl<'de, 'a, I: Iterator<Item = Input<'a>>> SeqAccess<'de> for Items<I> {
    type Error = Wrong;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Wrong> {
        let Some(item) = self.items.next() else {
            return Ok(None);
        };
        let at = format!("[{}]", self.read);
        self.read += 1;
        seed.deserialize(item).map(Some).map_err(|e| e.below(&at))
    }
}

struct Entries<'a, I> {
    entries: I,
    current: Option<(&'a str, Input<'a>)>,
}

impl<I> Entries<'_, I> {
    fn new(entries: I) -> Self {
        Self {
            entries,
            current: None,
        }
    }
}

impl<'de, 'a, I: Iterator<Item = (&'a str, Input<'a>)>> MapAccess<'de> for Entries<'a, I> {
    type Error = Wrong;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Wrong> {
        self.current = self.entries.next();
        let Some((key, _)) = self.current else {
            return Ok(None);
        };
        let key: StrDeserializer<'_, Wrong> = key.into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Wrong> {
        match self.current.take() {
            Some((key, value)) => seed.deserialize(value).map_err(|e| e.below(shown(key))),
            None => Err(Wrong::new("must have a value")),
        }
    }
}
