//! Bounded lists of requests.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, SeqAccess, Visitor},
};

/// Reads a list but keeps only its first `MAX` + 1 items, so that the check of the limit sees that there are too many.
/// The others are skipped without being decoded.
pub(crate) fn at_most<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_seq(AtMost::<T, MAX>(PhantomData))
}

/// Reads a list as [`at_most`] does. `None` if the request names none.
pub(crate) fn given_at_most<'de, D, T, const MAX: usize>(
    deserializer: D,
) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_option(Given::<T, MAX>(PhantomData))
}

struct Given<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Given<T, MAX> {
    type Value = Option<Vec<T>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a sequence or nothing")
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        at_most::<_, _, MAX>(deserializer).map(Some)
    }
}

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
