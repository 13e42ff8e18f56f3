//! The encodings of frames: JSON in text messages, MessagePack in binary ones, with the same maps in both.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{self, DeserializeOwned, Error as _, IgnoredAny, MapAccess, Visitor},
};

use super::{
    explain::{Value, explained, truncated},
    request::{EncodedRequest, Incoming, Request},
    route::body,
};
use crate::msgpack::Decoder;

/// The maximum nesting of a MessagePack frame. No frame needs more than five levels; deeper ones are an attack.
const DEPTH_MAX: usize = 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Codec {
    Json,
    MessagePack,
}

/// The highest id of a request: the highest whole number that JavaScript counts with.
const ID_MAX: u64 = (1 << 53) - 1;
const IDS: &str = "a whole number from 0 to 9007199254740991";

/// The error for bytes that are no frame: no map with a `type`. The connection is closed with 4500.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadFrame(String);

#[derive(Deserialize)]
struct Header {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    id: Option<Id>,
}

/// The id of a request, which the client chooses.
#[derive(Clone, Copy)]
struct Id(u64);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = Id;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(IDS)
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<Id, E> {
                let is = de::Unexpected::Unsigned(id);
                let in_range = (id <= ID_MAX).then_some(Id(id));
                in_range.ok_or_else(|| E::invalid_value(is, &self))
            }
        }
        deserializer.deserialize_u64(Number)
    }
}

/// The header of a frame, as far as it was read.
#[derive(Default)]
pub struct Begun {
    /// The `type`. `None` only if the bytes are no frame.
    pub kind: Option<String>,
    pub id: Option<u64>,
    /// Whether there is an id that is none.
    has_wrong_id: bool,
}

impl Begun {
    /// Returns the error for a frame without a `type`.
    #[must_use]
    pub fn bad_frame(&self) -> BadFrame {
        BadFrame(if self.has_wrong_id {
            format!("id: must be {IDS}")
        } else {
            "it has no type".into()
        })
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Type,
    Id,
    #[serde(other)]
    Other,
}

/// Reads a frame only until its `type` and `id` are known. Most frames begin with them.
impl<'de> Visitor<'de> for &mut Begun {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a frame")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while self.kind.is_none() || self.id.is_none() {
            match map.next_key()? {
                None => break,
                Some(Field::Type) if self.kind.is_none() => self.kind = Some(map.next_value()?),
                Some(Field::Id) if self.id.is_none() => {
                    let id = map.next_value::<Option<Id>>();
                    self.has_wrong_id = id.is_err();
                    self.id = id?.map(|id| id.0);
                }
                // The frame repeats one of them before the other one is known.
                Some(Field::Type | Field::Id) => return Err(A::Error::custom("no frame")),
                Some(Field::Other) => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

impl Codec {
    /// The WebSocket subprotocols with their encodings.
    pub const SUBPROTOCOLS: [(&'static str, Self); 2] = [
        ("chat.v1.json", Self::Json),
        ("chat.v1.msgpack", Self::MessagePack),
    ];

    /// Decodes one frame.
    ///
    /// # Errors
    /// [`BadFrame`] if the bytes are no map with a text `type` and an optional `id`. Any other mistake is returned
    /// in [`Incoming::request`], so that it is answered with the id.
    pub fn decode(self, bytes: &[u8]) -> Result<Incoming, BadFrame> {
        // The type is read first, then exactly that request. A tagged enum would copy every value into an intermediate
        // tree, and could not name the request in an error.
        let Begun { kind, id, .. } = self.begin(bytes);
        let is_map = kind.is_some();
        let tried = kind.filter(|_| id.is_some());
        let tried = tried.map(|kind| self.request(&kind, bytes));
        if let Some(Ok(request)) = tried {
            return Ok(Incoming {
                id,
                request: Ok(request),
            });
        }
        // This finds out whether the bytes are a frame with a mistake or no frame at all.
        let Header { kind, id } = self.read(bytes).map_err(BadFrame)?;
        if !is_map {
            // The decoders would take the items of a list as the fields.
            return Err(BadFrame("must be an object".into()));
        }
        Ok(Incoming {
            id: id.map(|id| id.0),
            request: tried.unwrap_or_else(|| self.request(&kind, bytes)),
        })
    }

    /// Returns the id of a frame without decoding the rest.
    #[must_use]
    pub fn id(self, bytes: &[u8]) -> Option<u64> {
        self.begin(bytes).id
    }

    fn request(self, kind: &str, bytes: &[u8]) -> Result<Request, String> {
        let codec = self;
        Request::decode(kind, Body { codec, bytes })
            .unwrap_or_else(|| Err(format!("unknown type {:?}", truncated(kind))))
    }

    /// Reads the type and the id of a frame, and nothing after them.
    #[must_use]
    pub fn begin(self, bytes: &[u8]) -> Begun {
        let mut begun = Begun::default();
        // An early end counts as an error for the decoder, and other mistakes are found when the whole frame is
        // decoded.
        match self {
            Self::Json => {
                let mut decoder = serde_json::Deserializer::from_slice(bytes);
                drop(decoder.deserialize_map(&mut begun));
            }
            Self::MessagePack => {
                let mut decoder = Decoder::with_depth(bytes, DEPTH_MAX);
                drop(decoder.deserialize_map(&mut begun));
            }
        }
        begun
    }

    fn read<T: DeserializeOwned>(self, bytes: &[u8]) -> Result<T, String> {
        match self {
            Self::Json => body(bytes),
            Self::MessagePack => {
                let mut decoder = Decoder::with_depth(bytes, DEPTH_MAX);
                let value = T::deserialize(&mut decoder).map_err(|_| {
                    let mut decoder = Decoder::with_depth(bytes, DEPTH_MAX);
                    match Value::deserialize(&mut decoder) {
                        Ok(value) => explained::<T>(&value, false),
                        Err(_) => "it is not MessagePack".into(),
                    }
                })?;
                if decoder.rest().is_empty() {
                    Ok(value)
                } else {
                    Err("bytes after the frame".into())
                }
            }
        }
    }

    /// Encodes one frame. Frames are plain data, so this cannot fail.
    #[must_use]
    pub fn encode<T: Serialize>(self, frame: &T) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.encode_onto(frame, &mut bytes);
        bytes
    }

    /// Encodes a frame like [`Self::encode`], and appends it to `bytes`.
    pub fn encode_onto<T: Serialize>(self, frame: &T, bytes: &mut Vec<u8>) {
        let encoded = match self {
            Self::Json => serde_json::to_writer(bytes, frame).map_err(|e| e.to_string()),
            Self::MessagePack => {
                rmp_serde::encode::write_named(bytes, frame).map_err(|e| e.to_string())
            }
        };
        debug_assert!(encoded.is_ok(), "a frame must always encode: {encoded:?}");
    }
}

/// A frame, from which a request is decoded.
#[derive(Clone, Copy)]
struct Body<'a> {
    codec: Codec,
    bytes: &'a [u8],
}

impl EncodedRequest for Body<'_> {
    fn read<T: DeserializeOwned>(self) -> Result<T, String> {
        self.codec.read(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Answer, Reply};

    fn both(json: &str) -> [(Codec, Vec<u8>); 2] {
        let value: serde_json::Value = serde_json::from_str(json).unwrap();
        [
            (Codec::Json, json.as_bytes().to_vec()),
            (Codec::MessagePack, rmp_serde::to_vec_named(&value).unwrap()),
        ]
    }

    #[test]
    fn a_request_is_understood_in_both_encodings() {
        let json = r#"{"type":"send","id":7,"conversation":"0199c0de-0000-7000-8000-000000000001",
            "client_id":"0199c0de-0000-4000-8000-000000000002","body":"hi","later":{"x":[1]}}"#;
        for (codec, bytes) in both(json) {
            let incoming = codec.decode(&bytes).unwrap();
            assert_eq!(incoming.id, Some(7));
            let Ok(Request::Send(send)) = incoming.request else {
                panic!("{incoming:?}")
            };
            assert_eq!(send.body, "hi");
        }
    }

    #[test]
    fn type_and_id_may_stand_anywhere() {
        for json in [
            r#"{"type":"read","id":3,"conversation":"0199c0de-0000-7000-8000-000000000001","seq":5}"#,
            r#"{"id":3,"conversation":"0199c0de-0000-7000-8000-000000000001","seq":5,"type":"read"}"#,
            r#"{"type":"read","conversation":"0199c0de-0000-7000-8000-000000000001","seq":5,"id":3}"#,
        ] {
            for (codec, bytes) in both(json) {
                let incoming = codec.decode(&bytes).unwrap();
                assert_eq!(incoming.id, Some(3));
                assert!(matches!(incoming.request, Ok(Request::Read(mark)) if mark.seq == 5));
            }
        }
        let json = r#"{"type":"typing","conversation":"0199c0de-0000-7000-8000-000000000001"}"#;
        for (codec, bytes) in both(json) {
            let incoming = codec.decode(&bytes).unwrap();
            assert_eq!(incoming.id, None);
            assert!(matches!(incoming.request, Ok(Request::Typing(_))));
        }
    }

    #[test]
    fn binary_uuids_and_cursors_are_understood() {
        #[derive(Serialize)]
        struct Frame<'a> {
            r#type: &'a str,
            id: u32,
            token: &'a str,
            cursors: std::collections::HashMap<crate::model::ConversationId, (u64, u64)>,
        }
        let id = crate::model::ConversationId::random();
        let frame = Frame {
            r#type: "connect",
            id: 1,
            token: "t",
            cursors: [(id, (4, 2))].into(),
        };
        for codec in [Codec::Json, Codec::MessagePack] {
            let Ok(Request::Connect(connect)) =
                codec.decode(&codec.encode(&frame)).unwrap().request
            else {
                panic!("{codec:?}")
            };
            assert_eq!(connect.cursors.unwrap()[&id], crate::model::Cursor(4, 2));
        }
    }

    #[test]
    fn a_mistake_keeps_its_request_id_and_noise_does_not_pass() {
        for (codec, bytes) in both(r#"{"type":"send","id":9}"#) {
            let incoming = codec.decode(&bytes).unwrap();
            assert_eq!(incoming.id, Some(9));
            assert!(incoming.request.unwrap_err().contains("conversation"));
        }
        for (codec, bytes) in both(r#"{"type":"nonsense","id":9}"#) {
            assert!(codec.decode(&bytes).unwrap().request.is_err());
        }
        for noise in [
            "",
            "null",
            "[]",
            r#"["ping",1]"#,
            "{}",
            r#"{"type":1}"#,
            r#"{"type":"ping","id":-1}"#,
            "{\"type\":",
            r#"{"type":"ping","id":1"#,
            r#"{"type":"read","type":"ping","id":1}"#,
            r#"{"id":1,"id":2,"type":"ping"}"#,
            r#"{"type":"ping","id":1} "x""#,
            r#"{"type":"typing","id":1,"conversation":"#,
        ] {
            assert!(Codec::Json.decode(noise.as_bytes()).is_err(), "{noise}");
        }
        let deep = [vec![0x91; 100_000], vec![0xc0]].concat();
        assert!(Codec::MessagePack.decode(&deep).is_err());
        let deep = [&b"\x82\xa4type\xa4ping\xa1x"[..], &deep].concat();
        assert!(Codec::MessagePack.decode(&deep).is_ok());
        assert!(Codec::MessagePack.decode(b"\x92\xa4ping\x01").is_err());
        let deep = format!(
            r#"{{"type":"ping","x":{}{}}}"#,
            "[".repeat(100_000),
            "]".repeat(100_000)
        );
        assert!(Codec::Json.decode(deep.as_bytes()).is_ok());
    }

    #[test]
    fn of_a_list_that_is_too_long_no_more_is_kept_than_shows_it() {
        let list = |item: &str, count: usize| vec![item; count].join(",");
        let create = r#"{"type":"create","id":1,"kind":"group","participants":[LIST]}"#;
        let watch = r#"{"type":"watch","id":1,"users":[LIST]}"#;
        let send = r#"{"type":"send","id":1,"conversation":"0199c0de-0000-7000-8000-000000000001",
            "client_id":"0199c0de-0000-4000-8000-000000000002","body":"","attachments":[LIST]}"#;
        let edit = r#"{"type":"edit","id":1,"conversation":"0199c0de-0000-7000-8000-000000000001",
            "seq":4,"body":"","attachments":[LIST]}"#;
        let delete = r#"{"type":"delete","id":1,"as_moderator":true,
            "conversation":"0199c0de-0000-7000-8000-000000000001","seqs":[LIST]}"#;
        let (user, link) = (r#""a""#, r#"{"url":"https://a"}"#);
        for (frame, item, max) in [
            (watch, user, 500),
            (create, user, 10_000),
            (send, link, 10),
            (edit, link, 10),
            (delete, "7", 256),
        ] {
            for (count, kept) in [(0, 0), (max, max), (max + 1, max + 1), (max + 999, max + 1)] {
                for (codec, bytes) in both(&frame.replace("LIST", &list(item, count))) {
                    let decoded = match codec.decode(&bytes).unwrap().request.unwrap() {
                        Request::Watch(users) => users.users.len(),
                        Request::Create(create) => create.participants.len(),
                        Request::Send(send) => send.attachments.len(),
                        Request::Edit(edit) => edit.attachments.unwrap().len(),
                        Request::Delete(delete) => {
                            assert!(!delete.as_moderator, "no client is a moderator");
                            delete.seqs.len()
                        }
                        other => panic!("{other:?}"),
                    };
                    assert_eq!(decoded, kept, "{codec:?}");
                }
            }
            for wrong in ["1", "null", r#"{"a":1}"#, r#""a""#] {
                let json = frame.replace("[LIST]", wrong);
                // An edit without attachments keeps those of the message.
                let is_absent = wrong == "null" && frame == edit;
                for (codec, bytes) in both(&json) {
                    let decoded = codec.decode(&bytes).unwrap().request;
                    assert_eq!(decoded.is_ok(), is_absent, "{json}");
                }
            }
            let unfinished = frame.replace("LIST", &list(item, max + 9));
            let unfinished = &unfinished[..unfinished.len() - 3];
            assert!(Codec::Json.decode(unfinished.as_bytes()).is_err());
        }
    }

    #[test]
    fn the_items_of_a_list_are_no_fields_of_an_object() {
        let send = r#"{"type":"send","id":7,"conversation":"0199c0de-0000-7000-8000-000000000001",
            "client_id":"0199c0de-0000-4000-8000-000000000002","body":"hi","attachments":[ITEM]}"#;
        let edit = r#"{"type":"edit","id":7,"conversation":"0199c0de-0000-7000-8000-000000000001",
            "seq":1,"body":"hi","attachments":[ITEM]}"#;
        let device =
            r#"{"type":"device_set","id":7,"device":"d","provider":"web","subscription":ITEM}"#;
        let keys = r#"{"type":"device_set","id":7,"device":"d","provider":"web",
            "subscription":{"endpoint":"https://a","keys":ITEM}}"#;
        for (frame, object, list, field) in [
            (
                send,
                r#"{"url":"https://a"}"#,
                r#"[null,"https://a"]"#,
                "attachments[0]",
            ),
            (
                edit,
                r#"{"url":"https://a"}"#,
                r#"[null,"https://a"]"#,
                "attachments[0]",
            ),
            (
                device,
                r#"{"endpoint":"https://a","keys":{"p256dh":"a","auth":"a"}}"#,
                r#"["https://a",{"p256dh":"a","auth":"a"}]"#,
                "subscription",
            ),
            (
                keys,
                r#"{"p256dh":"a","auth":"a"}"#,
                r#"["a","a"]"#,
                "subscription.keys",
            ),
        ] {
            for (codec, bytes) in both(&frame.replace("ITEM", object)) {
                codec.decode(&bytes).unwrap().request.unwrap();
            }
            for (codec, bytes) in both(&frame.replace("ITEM", list)) {
                let wrong = codec.decode(&bytes).unwrap().request.unwrap_err();
                assert_eq!(wrong, format!("{field}: must be an object"), "{codec:?}");
            }
        }
    }

    #[test]
    fn a_reply_carries_type_and_id() {
        let reply = Reply {
            id: Some(3),
            answer: Answer::Pong { time: 5 },
        };
        assert_eq!(
            Codec::Json.encode(&reply),
            br#"{"id":3,"type":"pong","time":5}"#
        );
        let value: serde_json::Value =
            rmp_serde::from_slice(&Codec::MessagePack.encode(&reply)).unwrap();
        assert_eq!(
            value,
            serde_json::json!({"id": 3, "type": "pong", "time": 5})
        );
    }
}
