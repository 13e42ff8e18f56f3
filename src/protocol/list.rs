//! Bounded lists of requests, and objects that are no lists.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny, SeqAccess, Visitor},
    forward_to_deserialize_any,
};

/// Reads a struct from an object only. The decoders would take the items of a list as its fields.
pub(crate) fn object<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: DeserializeOwned,
{
    T::deserialize(Object(deserializer))
}

struct Object<D>(D);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Object<D> {
    type Error = D::Error;

    fn is_human_readable(&self) -> bool {
        self.0.is_human_readable()
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_map(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq
        tuple tuple_struct map struct enum identifier ignored_any
    }
}

/// Reads a list but keeps only its first `MAX` + 1 items, so that the check of the limit sees that there are too many.
/// The others are skipped without being decoded.
pub(crate) fn at_most<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_seq(AtMost::<T, MAX>(PhantomData))
}

/// Reads a list of structs as [`at_most`] does, each with [`object`].
pub(crate) fn objects_at_most<'de, D, T, const MAX: usize>(
    deserializer: D,
) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: DeserializeOwned,
{
    let items = at_most::<_, AsObject<T>, MAX>(deserializer)?;
    Ok(items.into_iter().map(|AsObject(item)| item).collect())
}

/// Reads a list as [`objects_at_most`] does. `None` if the request names none.
pub(crate) fn given_objects_at_most<'de, D, T, const MAX: usize>(
    deserializer: D,
) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: DeserializeOwned,
{
    let given = Option::<Objects<T, MAX>>::deserialize(deserializer)?;
    Ok(given.map(|Objects(items)| items))
}

/// Reads a struct as [`object`] does. `None` if the request names none.
pub(crate) fn given_object<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: DeserializeOwned,
{
    let given = Option::<AsObject<T>>::deserialize(deserializer)?;
    Ok(given.map(|AsObject(value)| value))
}

#[derive(Deserialize)]
#[serde(transparent, bound = "T: DeserializeOwned")]
struct AsObject<T>(#[serde(deserialize_with = "object")] T);

#[derive(Deserialize)]
#[serde(transparent, bound = "T: DeserializeOwned")]
struct Objects<T, const MAX: usize>(
    #[serde(deserialize_with = "objects_at_most::<_, _, MAX>")] Vec<T>,
);

struct AtMost<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for AtMost<T, MAX> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a sequence")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
        let mut kept = Vec::new();
        while kept.len() <= MAX {
            match items.next_element()? {
                Some(item) => kept.push(item),
                None => return Ok(kept),
            }
        }
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(kept)
    }
}
