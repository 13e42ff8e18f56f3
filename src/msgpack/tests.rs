use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*};
use serde::{Serialize, de::IgnoredAny};
use serde_json::Value;

use super::*;

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
struct Everything<'a> {
    text: &'a str,
    #[serde(with = "raw")]
    bytes: Vec<u8>,
    small: i8,
    large: u64,
    below: i64,
    float: f64,
    short: f32,
    flag: bool,
    letter: char,
    absent: Option<u32>,
    present: Option<u32>,
    list: Vec<u16>,
    pair: (u8, String),
    array: [u8; 4],
    map: BTreeMap<String, u64>,
    numbered: BTreeMap<u32, bool>,
    kinds: Vec<Kind>,
    #[serde(default)]
    later: Option<String>,
    nothing: (),
    id: uuid::Uuid,
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
enum Kind {
    Unit,
    New(u32),
    Tuple(u32, String),
    Struct { seq: u64, names: Vec<String> },
}

mod raw {
    use serde::{Deserializer, Serializer, de::Visitor};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        struct Raw;
        impl Visitor<'_> for Raw {
            type Value = Vec<u8>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
                Ok(bytes.to_vec())
            }
        }
        from.deserialize_bytes(Raw)
    }
}

fn everything() -> Everything<'static> {
    Everything {
        text: "hällo",
        bytes: vec![0, 255, 7],
        small: -128,
        large: u64::MAX,
        below: i64::MIN,
        float: -0.5,
        short: 0.25,
        flag: true,
        letter: 'ß',
        absent: None,
        present: Some(70_000),
        list: (0..40).collect(),
        pair: (3, "x".repeat(300)),
        array: [1, 2, 3, 4],
        map: (0..20).map(|n| (n.to_string(), n << 33)).collect(),
        numbered: [(1, true), (70_000, false)].into(),
        kinds: vec![
            Kind::Unit,
            Kind::New(5),
            Kind::Tuple(1, "y".repeat(70_000)),
            Kind::Struct {
                seq: 1,
                names: vec![String::new()],
            },
        ],
        later: None,
        nothing: (),
        id: uuid::Uuid::from_u128(11),
    }
}

#[test]
fn what_the_library_writes_is_read() {
    let value = everything();
    for bytes in [
        rmp_serde::to_vec(&value).unwrap(),
        rmp_serde::to_vec_named(&value).unwrap(),
    ] {
        assert_eq!(from_slice::<Everything>(&bytes).unwrap(), value);
        let mut decoder = Decoder::new(&bytes);
        IgnoredAny::deserialize(&mut decoder).unwrap();
        assert_eq!(decoder.rest(), b"");
    }
}

#[test]
fn values_that_end_too_early_are_refused() {
    let bytes = rmp_serde::to_vec_named(&everything()).unwrap();
    for end in (0..bytes.len()).filter(|end| *end < 2000 || end % 97 == 0) {
        assert!(from_slice::<Everything>(&bytes[..end]).is_err());
        let skipped = from_slice::<IgnoredAny>(&bytes[..end]);
        assert_eq!(skipped.unwrap_err(), Error::End);
    }
}

#[test]
fn a_length_beyond_the_end_makes_no_room() {
    for marker in [0xdd, 0xdf, 0xdb, 0xc6, 0xc9] {
        let bytes = [marker, 0xff, 0xff, 0xff, 0xff, 0x01];
        let read = from_slice::<Vec<u64>>(&bytes);
        assert!(read.is_err());
        assert_eq!(from_slice::<IgnoredAny>(&bytes).unwrap_err(), Error::End);
    }
}

#[test]
fn depth_is_bounded_for_every_shape() {
    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only decoded")]
    enum Nested {
        In(Box<Nested>),
        Out,
    }
    let lists = |depth: usize| [vec![0x91; depth], vec![0xc0]].concat();
    let enums = |depth: usize| {
        let name = [0x81, 0xa2, b'I', b'n'];
        [name.repeat(depth), vec![0xa3, b'O', b'u', b't']].concat()
    };
    let read = |bytes: &[u8]| Value::deserialize(&mut Decoder::with_depth(bytes, 32)).err();
    assert_eq!(read(&lists(32)), None);
    assert_eq!(read(&lists(33)), Some(Error::Depth));
    let read = |bytes: &[u8]| Vec::<Value>::deserialize(&mut Decoder::with_depth(bytes, 32)).err();
    assert_eq!(read(&lists(1_000_000)), Some(Error::Depth));
    let read = |bytes: &[u8]| Nested::deserialize(&mut Decoder::with_depth(bytes, 32)).err();
    assert_eq!(read(&enums(32)), None);
    assert_eq!(read(&enums(1_000_000)), Some(Error::Depth));
    // The depth is given back behind each value.
    let many = [vec![0xdc, 0, 100], lists(30).repeat(100)].concat();
    let read = Value::deserialize(&mut Decoder::with_depth(&many, 32));
    assert_eq!(read.unwrap().as_array().unwrap().len(), 100);
}

/// Skipping needs no stack, and a value that is ignored may have any depth.
#[test]
fn what_is_skipped_may_have_any_depth() {
    let skip = |bytes: &[u8]| {
        let mut decoder = Decoder::with_depth(bytes, 1);
        let skipped = IgnoredAny::deserialize(&mut decoder).map(drop);
        (skipped, decoder.rest().len())
    };
    let lists = |depth: usize| [vec![0x91; depth], vec![0xc0]].concat();
    let maps = |depth: usize| [[0x81, 0x07].repeat(depth), vec![0xc0]].concat();
    let keys = |depth: usize| [vec![0x81; depth], vec![0xc0; depth + 1]].concat();
    for depth in [0, 1, 2, 33, 1_000_000] {
        for mut value in [lists(depth), maps(depth), keys(depth)] {
            value.push(1);
            assert_eq!(skip(&value), (Ok(()), 1));
            value.truncate(value.len() - 2);
            assert_eq!(skip(&value).0, Err(Error::End));
        }
    }
    let wide = [vec![0x93, 0x92, 1, 2, 0x82, 1, 2, 3, 0x90, 0x80], vec![9]].concat();
    assert_eq!(skip(&wide), (Ok(()), 1));
    // Extensions too, and lengths that only together are beyond the end.
    assert_eq!(skip(&[0x92, 0xd4, 1, 2, 0xc7, 0, 5]), (Ok(()), 0));
    assert_eq!(skip(&[0x92, 0x92, 1, 2]).0, Err(Error::End));
    assert_eq!(skip(&[0x94, 0x92, 1, 2, 3]).0, Err(Error::End));
}

#[test]
fn values_of_another_shape_are_refused() {
    let refused = |bytes: &[u8], text: &str| {
        let error = from_slice::<Everything>(bytes).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    refused(&[0xc1], "reserved");
    refused(&[0xa1, 0xff], "UTF-8");
    refused(&[0x05], "integer `5`");
    refused(&[0xd4, 1, 2], "extension");
    assert!(from_slice::<Value>(&[0x91, 0xd4, 1, 2]).is_err());
    // More parts than the type has: written by a newer build, or by an error.
    assert!(from_slice::<(u8, u8)>(&[0x93, 1, 2, 3]).is_err());
    assert!(from_slice::<Kind>(&[0xa3, b'N', b'e', b'w']).is_err());
    assert!(
        from_slice::<Vec<Kind>>(&[0xc4, 0]).is_err(),
        "bytes are no sequence"
    );
    assert!(from_slice::<Kind>(&[0x82, 0xa3, b'N', b'e', b'w', 1, 0xa1, b'x', 1]).is_err());
    // What follows the value is left for the caller.
    let mut decoder = Decoder::new(&[1, 2]);
    assert_eq!(u8::deserialize(&mut decoder), Ok(1));
    assert_eq!(decoder.rest(), [2]);
}

proptest! {
    /// A value that one decoder reads, the other reads too, and it is the same one.
    #[test]
    fn it_reads_the_same_as_the_library(bytes in vec(any::<u8>(), 0..40)) {
        if let Ok(ours) = from_slice::<Value>(&bytes) {
            prop_assert_eq!(rmp_serde::from_slice::<Value>(&bytes).unwrap(), ours);
        }
        // The library also takes bytes for a sequence of numbers, so an empty one for any sequence. Nobody writes that.
        let has_bytes = bytes.iter().any(|byte| (0xc4..=0xc6).contains(byte));
        if let Ok(theirs) = rmp_serde::from_slice::<Vec<Kind>>(&bytes) && !has_bytes {
            prop_assert_eq!(from_slice::<Vec<Kind>>(&bytes), Ok(theirs));
        }
        let _ = from_slice::<Everything>(&bytes);
        let _ = from_slice::<IgnoredAny>(&bytes);
    }
}
