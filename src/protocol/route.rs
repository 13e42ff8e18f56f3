//! The requests of back ends over HTTP: what a request is read from, and what describes it in OpenAPI.

use std::fmt;

use serde::{
    Deserializer,
    de::{
        DeserializeOwned, DeserializeSeed, Error as _, IgnoredAny, IntoDeserializer as _,
        MapAccess, Visitor,
    },
    forward_to_deserialize_any,
};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{RefOr, Schema},
};

use super::explain::{Value, explained, truncated};

/// A type as OpenAPI describes it.
pub struct Described {
    pub name: String,
    pub schema: RefOr<Schema>,
    /// The types that it names.
    pub others: Vec<(String, RefOr<Schema>)>,
}

impl Described {
    pub(super) fn of<T: ToSchema>() -> Self {
        let mut others = Vec::new();
        T::schemas(&mut others);
        Self {
            name: T::name().into_owned(),
            schema: <T as PartialSchema>::schema(),
            others,
        }
    }
}

/// What a request over HTTP is read from. Each field has one source: the path if it is named there, else the query or the body.
pub struct Given<'a> {
    /// The fields in the path.
    pub path: &'a [(String, String)],
    pub rest: Rest<'a>,
}

/// Where the fields are that are not in the path.
pub enum Rest<'a> {
    Query(Vec<(String, String)>),
    Body(&'a [u8]),
}

impl Given<'_> {
    /// Decodes the fields of a request.
    ///
    /// # Errors
    /// A text that names the field that is wrong, or the position of what is no JSON.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T, String> {
        let bytes = match &self.rest {
            Rest::Body(bytes) => *bytes,
            Rest::Query(query) => {
                let query = query.iter().filter(|(name, _)| !self.is_in_path(name));
                let words = self.path.iter().chain(query).map(named);
                return Value::Map(words.collect())
                    .read(true)
                    .map_err(|wrong| truncated(&wrong.to_string()));
            }
        };
        if !is_list(bytes) {
            let mut decoder = serde_json::Deserializer::from_slice(bytes);
            let read = T::deserialize(WithPath {
                given: self,
                body: &mut decoder,
            });
            if let Ok(read) = read
                && decoder.end().is_ok()
            {
                return Ok(read);
            }
        }
        Err(match serde_json::from_slice(bytes) {
            Ok(Value::Map(fields)) => {
                let fields = fields
                    .into_iter()
                    .filter(|(name, _)| !name.as_text().is_some_and(|name| self.is_in_path(name)));
                let words = self.path.iter().map(named);
                explained::<T>(&Value::Map(words.chain(fields).collect()), true)
            }
            Ok(value) => explained::<T>(&value, true),
            Err(error) => body_error(&error),
        })
    }

    fn is_in_path(&self, name: &str) -> bool {
        self.path.iter().any(|(known, _)| known == name)
    }
}

/// Returns a field of a path or a query as an entry of a map.
fn named((name, word): &(String, String)) -> (Value, Value) {
    (Value::Text(name.clone()), Value::Word(word.clone()))
}

/// Reads JSON.
///
/// # Errors
/// A text that names the field that is wrong, or the position of what is no JSON.
pub(crate) fn body<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let read = if is_list(bytes) {
        Err(())
    } else {
        serde_json::from_slice(bytes).map_err(drop)
    };
    read.map_err(|()| match serde_json::from_slice(bytes) {
        Ok(value) => explained::<T>(&value, true),
        Err(error) => body_error(&error),
    })
}

/// Whether JSON is a list. The decoder would take its items as the fields of a struct.
fn is_list(bytes: &[u8]) -> bool {
    bytes.trim_ascii_start().starts_with(b"[")
}

/// Says where something is no JSON.
fn body_error(error: &serde_json::Error) -> String {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or_default();
    format!("it is not JSON: {text}, at line {line}, column {column}")
}

/// Decodes the fields of the path, and then those of a body as they are read.
struct WithPath<'a, D> {
    given: &'a Given<'a>,
    body: D,
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for WithPath<'_, D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let Self { given, body } = self;
        body.deserialize_map(AfterPath { given, visitor })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq
        tuple tuple_struct map struct enum identifier ignored_any
    }
}

struct AfterPath<'a, V> {
    given: &'a Given<'a>,
    visitor: V,
}

impl<'de, V: Visitor<'de>> Visitor<'de> for AfterPath<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.visitor.expecting(f)
    }

    fn visit_map<A: MapAccess<'de>>(self, body: A) -> Result<V::Value, A::Error> {
        let Self { given, visitor } = self;
        visitor.visit_map(Fields {
            given,
            read: 0,
            word: None,
            body,
        })
    }
}

struct Fields<'a, A> {
    given: &'a Given<'a>,
    /// How many fields of the path were read.
    read: usize,
    /// The value of the last of them, until it is read.
    word: Option<&'a str>,
    body: A,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Fields<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        if let Some((name, word)) = self.given.path.get(self.read) {
            self.read += 1;
            self.word = Some(word);
            return seed
                .deserialize(name.as_str().into_deserializer())
                .map(Some);
        }
        while let Some(name) = self.body.next_key::<String>()? {
            if !self.given.is_in_path(&name) {
                return seed.deserialize(name.into_deserializer()).map(Some);
            }
            self.body.next_value::<IgnoredAny>()?;
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        match self.word.take() {
            Some(word) => Value::Word(word.to_owned())
                .read_as(seed, true)
                .map_err(A::Error::custom),
            None => self.body.next_value_seed(seed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{ChangesRequest, HistoryRequest, Reaction, Send};

    const AT: &str = "0199c0de-0000-4000-8000-000000000001";

    fn words(words: &[(&str, &str)]) -> Vec<(String, String)> {
        let owned = |(name, word): &(&str, &str)| ((*name).to_owned(), (*word).to_owned());
        words.iter().map(owned).collect()
    }

    fn with_query<T: DeserializeOwned>(
        path: &[(&str, &str)],
        query: &[(&str, &str)],
    ) -> Result<T, String> {
        let (path, rest) = (&words(path)[..], Rest::Query(words(query)));
        Given { path, rest }.read()
    }

    fn with_body<T: DeserializeOwned>(body: &str) -> Result<T, String> {
        let (path, rest) = (
            &words(&[("conversation", AT)])[..],
            Rest::Body(body.as_bytes()),
        );
        Given { path, rest }.read()
    }

    #[test]
    fn each_field_has_one_source() {
        let id = AT.parse().unwrap();
        let body = format!(
            r#"{{"conversation": 7, "client_id": "{AT}", "later": [1], "body": "hi", "conversation": []}}"#
        );
        let send: Send = with_body(&body).unwrap();
        assert_eq!((send.conversation, &send.body[..]), (id, "hi"));
        let path = [("conversation", AT), ("seq", "7"), ("emoji", "12")];
        let reaction: Reaction = with_query(&path, &[("emoji", "x"), ("later", "")]).unwrap();
        assert_eq!((reaction.seq, &reaction.emoji[..]), (7, "12"));
        let page: HistoryRequest =
            with_query(&path[..1], &[("limit", "5"), ("before", "9")]).unwrap();
        assert_eq!(
            (page.limit, page.before, page.after),
            (Some(5), Some(9), None)
        );
    }

    #[test]
    fn what_is_wrong_is_said() {
        let query = |query: &[(&str, &str)]| {
            with_query::<ChangesRequest>(&[("conversation", AT)], query).unwrap_err()
        };
        assert_eq!(query(&[]), "after: is missing");
        assert_eq!(
            query(&[("after", "x")]),
            "after: must be a whole number, at least 0"
        );
        assert_eq!(
            query(&[("after", "1"), ("after", "2")]),
            "after: is given twice"
        );
        let body = |body| with_body::<Send>(body).unwrap_err();
        assert_eq!(body(r#"{"body": "hi"}"#), "client_id: is missing");
        assert_eq!(
            body(r#"{"client_id": 7, "conversation": 1}"#),
            "client_id: must be a UUID"
        );
        assert_eq!(body("[1]"), "must be an object");
        assert_eq!(body("7"), "must be an object");
        assert!(body("{").starts_with("it is not JSON: "));
        assert!(
            body(&format!(r#"{{"client_id": "{AT}", "body": "x"}} 7"#))
                .starts_with("it is not JSON: ")
        );
    }
}
