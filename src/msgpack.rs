//! Reads MessagePack from bytes in memory into types of serde. `rmp_serde` writes it.
//!
//! The decoder of `rmp_serde` is generated anew for each type and for each helper visitor of serde's derive, with all of its
//! reading and all conversions: that was a fifth of the code of this program. Here, everything that does not depend on the
//! type is generated once (docs/performance.md, "Building").

use std::fmt::Display;

use serde::{
    Deserialize, Deserializer,
    de::{
        self, DeserializeSeed, EnumAccess, Error as _, Expected, MapAccess, SeqAccess, Unexpected,
        VariantAccess, Visitor, value::UnitDeserializer,
    },
    forward_to_deserialize_any,
};

/// The maximum nesting of a value, unless a caller sets a lower one. Each level needs some hundred bytes of stack.
const DEPTH_MAX: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("it ends too early")]
    End,
    #[error("a text is not UTF-8")]
    Utf8,
    #[error("it is nested too deeply")]
    Depth,
    #[error("{0}")]
    Value(Box<str>),
}

impl de::Error for Error {
    fn custom<T: Display>(message: T) -> Self {
        Self::Value(message.to_string().into())
    }
}

type Result<T> = std::result::Result<T, Error>;

/// Reads the first value of `bytes`. What follows it is ignored.
///
/// # Errors
/// [`Error`] if the bytes are not MessagePack or have another shape than the type.
pub(crate) fn from_slice<'de, T: Deserialize<'de>>(bytes: &'de [u8]) -> Result<T> {
    T::deserialize(&mut Decoder::new(bytes))
}

/// Reads one value after another.
pub struct Decoder<'de> {
    rest: &'de [u8],
    /// How many more levels of lists and maps a value may have.
    depth: usize,
}

/// A value, or the beginning of a list or a map.
enum Token<'de> {
    Nil,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(&'de str),
    Bytes(&'de [u8]),
    /// The number of elements that follow.
    List(usize),
    /// The number of keys that follow, each with a value.
    Map(usize),
    Extension,
}

impl Token<'_> {
    #[cold]
    fn unexpected(&self, expected: &dyn Expected) -> Error {
        let found = match *self {
            Self::Nil => Unexpected::Unit,
            Self::Bool(value) => Unexpected::Bool(value),
            Self::Unsigned(value) => Unexpected::Unsigned(value),
            Self::Signed(value) => Unexpected::Signed(value),
            Self::Float(value) => Unexpected::Float(value),
            Self::Text(text) => Unexpected::Str(text),
            Self::Bytes(bytes) => Unexpected::Bytes(bytes),
            Self::List(_) => Unexpected::Seq,
            Self::Map(_) => Unexpected::Map,
            Self::Extension => Unexpected::Other("extension"),
        };
        Error::invalid_type(found, expected)
    }
}

impl<'de> Decoder<'de> {
    #[must_use]
    pub fn new(bytes: &'de [u8]) -> Self {
        Self::with_depth(bytes, DEPTH_MAX)
    }

    /// Returns a decoder of values with at most `depth` levels of lists and maps.
    #[must_use]
    pub fn with_depth(bytes: &'de [u8], depth: usize) -> Self {
        Self { rest: bytes, depth }
    }

    /// The bytes that were not read yet.
    #[must_use]
    pub fn rest(&self) -> &'de [u8] {
        self.rest
    }

    fn take(&mut self, bytes: usize) -> Result<&'de [u8]> {
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or(Error::End)?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(Error::End)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn byte(&mut self) -> Result<u8> {
        self.array().map(|[byte]| byte)
    }

    /// Reads an unsigned number of 1, 2, 4 or 8 bytes.
    fn unsigned(&mut self, power: u8) -> Result<u64> {
        Ok(match power {
            0 => self.byte()?.into(),
            1 => u16::from_be_bytes(self.array()?).into(),
            2 => u32::from_be_bytes(self.array()?).into(),
            _ => u64::from_be_bytes(self.array()?),
        })
    }

    fn signed(&mut self, power: u8) -> Result<i64> {
        Ok(match power {
            0 => i8::from_be_bytes(self.array()?).into(),
            1 => i16::from_be_bytes(self.array()?).into(),
            2 => i32::from_be_bytes(self.array()?).into(),
            _ => i64::from_be_bytes(self.array()?),
        })
    }

    /// Reads a length. It is at most u32, so it fits.
    fn length(&mut self, power: u8) -> Result<usize> {
        self.unsigned(power).map(|length| length as usize)
    }

    fn text(&mut self, bytes: usize) -> Result<Token<'de>> {
        let text = std::str::from_utf8(self.take(bytes)?);
        text.map(Token::Text).map_err(|_| Error::Utf8)
    }

    /// Each element has at least one byte, so a length beyond the end is found before room for it is made.
    fn list(&self, length: usize) -> Result<Token<'de>> {
        (length <= self.rest.len())
            .then_some(Token::List(length))
            .ok_or(Error::End)
    }

    fn map(&self, length: usize) -> Result<Token<'de>> {
        (length <= self.rest.len() / 2)
            .then_some(Token::Map(length))
            .ok_or(Error::End)
    }

    fn extension(&mut self, bytes: usize) -> Result<Token<'de>> {
        self.take(1 + bytes)?; // The kind, and the content.
        Ok(Token::Extension)
    }

    fn token(&mut self) -> Result<Token<'de>> {
        let marker = self.byte()?;
        let short = usize::from(marker);
        match marker {
            0x00..=0x7f => Ok(Token::Unsigned(marker.into())),
            0x80..=0x8f => self.map(short & 0x0f),
            0x90..=0x9f => self.list(short & 0x0f),
            0xa0..=0xbf => self.text(short & 0x1f),
            0xc0 => Ok(Token::Nil),
            0xc1 => Err(Error::Value("a reserved marker".into())),
            0xc2 | 0xc3 => Ok(Token::Bool(marker == 0xc3)),
            0xc4..=0xc6 => {
                let length = self.length(marker - 0xc4)?;
                self.take(length).map(Token::Bytes)
            }
            0xc7..=0xc9 => {
                let length = self.length(marker - 0xc7)?;
                self.extension(length)
            }
            0xca => Ok(Token::Float(f32::from_be_bytes(self.array()?).into())),
            0xcb => Ok(Token::Float(f64::from_be_bytes(self.array()?))),
            0xcc..=0xcf => self.unsigned(marker - 0xcc).map(Token::Unsigned),
            0xd0..=0xd3 => self
                .signed(marker - 0xd0)
                .map(|number| u64::try_from(number).map_or(Token::Signed(number), Token::Unsigned)),
            0xd4..=0xd8 => self.extension(1 << (marker - 0xd4)),
            0xd9..=0xdb => {
                let length = self.length(marker - 0xd9)?;
                self.text(length)
            }
            0xdc | 0xdd => {
                let length = self.length(marker - 0xdb)?;
                self.list(length)
            }
            0xde | 0xdf => {
                let length = self.length(marker - 0xdd)?;
                self.map(length)
            }
            0xe0..=0xff => Ok(Token::Signed(i8::from_be_bytes([marker]).into())),
        }
    }

    fn descend(&mut self) -> Result<()> {
        self.depth = self.depth.checked_sub(1).ok_or(Error::Depth)?;
        Ok(())
    }

    /// Skips a value of any depth.
    fn skip(&mut self) -> Result<()> {
        let mut left = 1;
        while left > 0 {
            left -= 1;
            left += match self.token()? {
                Token::List(length) => length,
                Token::Map(length) => 2 * length,
                _ => 0,
            };
            // Each of them has at least one byte.
            if left > self.rest.len() {
                return Err(Error::End);
            }
        }
        Ok(())
    }

    fn visit_list<V: Visitor<'de>>(&mut self, length: usize, visitor: V) -> Result<V::Value> {
        self.descend()?;
        let mut elements = Elements {
            decoder: self,
            left: length,
        };
        let value = visitor.visit_seq(&mut elements)?;
        elements.end(length)?;
        Ok(value)
    }

    fn visit_map<V: Visitor<'de>>(&mut self, length: usize, visitor: V) -> Result<V::Value> {
        self.descend()?;
        let mut elements = Elements {
            decoder: self,
            left: length,
        };
        let value = visitor.visit_map(&mut elements)?;
        elements.end(length)?;
        Ok(value)
    }

    /// Reads the marker of an enum's value. Returns whether the variant has a content, which follows its name.
    fn variant(&mut self, expected: &dyn Expected) -> Result<bool> {
        let before = self.rest;
        match self.token()? {
            Token::Map(1) => Ok(true),
            Token::Text(_) => {
                self.rest = before;
                Ok(false)
            }
            other => Err(other.unexpected(expected)),
        }
    }
}

impl<'de> Deserializer<'de> for &mut Decoder<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        match self.token()? {
            Token::Nil => visitor.visit_unit(),
            Token::Bool(value) => visitor.visit_bool(value),
            Token::Unsigned(value) => visitor.visit_u64(value),
            Token::Signed(value) => visitor.visit_i64(value),
            Token::Float(value) => visitor.visit_f64(value),
            Token::Text(text) => visitor.visit_borrowed_str(text),
            Token::Bytes(bytes) => visitor.visit_borrowed_bytes(bytes),
            Token::List(length) => self.visit_list(length, visitor),
            Token::Map(length) => self.visit_map(length, visitor),
            // No other value is given to a visitor like this.
            Token::Extension => visitor.visit_newtype_struct(UnitDeserializer::<Error>::new()),
        }
    }

    forward_to_deserialize_any! { bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char unit unit_struct }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        match self.token()? {
            Token::Text(text) => visitor.visit_borrowed_str(text),
            other => Err(other.unexpected(&visitor)),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        self.deserialize_str(visitor)
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        match self.token()? {
            Token::Bytes(bytes) => visitor.visit_borrowed_bytes(bytes),
            Token::Text(text) => visitor.visit_borrowed_str(text),
            Token::List(length) => self.visit_list(length, visitor),
            other => Err(other.unexpected(&visitor)),
        }
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        self.deserialize_bytes(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        match self.rest.split_first() {
            Some((0xc0, rest)) => {
                self.rest = rest;
                visitor.visit_none()
            }
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        match self.token()? {
            Token::List(length) => self.visit_list(length, visitor),
            other => Err(other.unexpected(&visitor)),
        }
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: usize,
        visitor: V,
    ) -> Result<V::Value> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        match self.token()? {
            Token::Map(length) => self.visit_map(length, visitor),
            other => Err(other.unexpected(&visitor)),
        }
    }

    /// Structs of stored rows are lists, and those of messages are maps.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        match self.token()? {
            Token::List(length) => self.visit_list(length, visitor),
            Token::Map(length) => self.visit_map(length, visitor),
            other => Err(other.unexpected(&visitor)),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        let has_content = self.variant(&visitor)?;
        if has_content {
            self.descend()?;
        }
        let value = visitor.visit_enum(Variant {
            decoder: self,
            has_content,
        })?;
        self.depth += usize::from(has_content);
        Ok(value)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        self.skip()?;
        visitor.visit_unit()
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}

/// The elements of a list, or the keys and values of a map.
struct Elements<'a, 'de> {
    decoder: &'a mut Decoder<'de>,
    left: usize,
}

impl Elements<'_, '_> {
    fn next(&mut self) -> bool {
        let more = self.left > 0;
        self.left -= usize::from(more);
        more
    }

    /// Checks that all parts were read, after the visitor.
    fn end(self, length: usize) -> Result<()> {
        self.decoder.depth += 1;
        if self.left == 0 {
            return Ok(());
        }
        let known = length - self.left;
        Err(Error::Value(
            format!("{length} parts, and only {known} are known").into(),
        ))
    }
}

impl<'de> SeqAccess<'de> for &mut Elements<'_, 'de> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>> {
        if !self.next() {
            return Ok(None);
        }
        seed.deserialize(&mut *self.decoder).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

impl<'de> MapAccess<'de> for &mut Elements<'_, 'de> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>> {
        if !self.next() {
            return Ok(None);
        }
        seed.deserialize(&mut *self.decoder).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value> {
        seed.deserialize(&mut *self.decoder)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

/// The name of a variant, and its content.
struct Variant<'a, 'de> {
    decoder: &'a mut Decoder<'de>,
    has_content: bool,
}

impl<'a, 'de> Variant<'a, 'de> {
    fn content(self) -> Result<&'a mut Decoder<'de>> {
        if self.has_content {
            return Ok(self.decoder);
        }
        Err(Error::Value("a variant lacks its content".into()))
    }
}

impl<'de> EnumAccess<'de> for Variant<'_, 'de> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self)> {
        let name = seed.deserialize(&mut *self.decoder)?;
        Ok((name, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_, 'de> {
    type Error = Error;

    fn unit_variant(self) -> Result<()> {
        if self.has_content {
            return <()>::deserialize(self.decoder);
        }
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value> {
        seed.deserialize(self.content()?)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value> {
        self.content()?.deserialize_seq(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        self.content()?.deserialize_struct("", fields, visitor)
    }
}

#[cfg(test)]
mod tests;
