//! Signed addresses of files. Whoever has one may download the file until it expires, without a token, so that `<img>`
//! and other programs can use it.

use aws_lc_rs::{hkdf, hmac};

use crate::model::AttachmentId;

/// The label of the key. It is derived from a secret that may have other uses.
const LABEL: &[u8] = b"chat-gateway attachments v1";

/// Bytes of the name of a reader. They are random enough that no two users share one.
const READER_BYTES: usize = 8;

/// A part of a file that can be downloaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Variant {
    Original,
    Thumbnail,
}

impl Variant {
    /// Returns the variant with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "original" => Some(Self::Original),
            "thumbnail" => Some(Self::Thumbnail),
            _ => None,
        }
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Original => "original",
            Self::Thumbnail => "thumbnail",
        }
    }
}

/// The key of signed addresses.
pub struct Signer {
    key: hmac::Key,
    window_s: u64,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Signer")
    }
}

/// A signature, and when it expires.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Signature {
    /// Seconds since 1970.
    pub expires_s: u64,
    /// The user who got the address, as a digest that does not reveal the id: see [`Signer::reader`].
    pub reader: String,
    pub text: String,
}

impl Signer {
    /// Derives the key from a secret.
    #[must_use]
    pub fn new(secret: &[u8], window_s: u64) -> Self {
        let mut key = [0; 32];
        let derived = hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(secret);
        let filled = derived
            .expand(&[LABEL], hkdf::HKDF_SHA256)
            .and_then(|okm| okm.fill(&mut key));
        debug_assert!(filled.is_ok(), "32 bytes are the length of the hash");
        Self {
            key: hmac::Key::new(hmac::HMAC_SHA256, &key),
            window_s: window_s.max(1),
        }
    }

    /// Returns the name of a reader in addresses, so that the downloads of one reader can be counted.
    #[must_use]
    pub fn reader(&self, reader: &str) -> String {
        let tag = hmac::sign(&self.key, &[b"reader ", reader.as_bytes()].concat());
        hexadecimal(&tag.as_ref()[..READER_BYTES])
    }

    /// Signs the address of a file for a reader. It is valid for one to two windows. All signatures of one window are equal,
    /// so that browsers can cache the file.
    #[must_use]
    pub fn sign(
        &self,
        file: AttachmentId,
        variant: Variant,
        reader: &str,
        now_s: u64,
    ) -> Signature {
        let expires_s = (now_s / self.window_s + 2) * self.window_s;
        let tag = hmac::sign(&self.key, &message(file, variant, expires_s, reader));
        Signature {
            expires_s,
            reader: reader.to_owned(),
            text: hexadecimal(tag.as_ref()),
        }
    }

    /// Returns whether a signature is valid now.
    #[must_use]
    pub fn is_valid(
        &self,
        file: AttachmentId,
        variant: Variant,
        signature: &Signature,
        now_s: u64,
    ) -> bool {
        let Some(tag) = bytes_of(&signature.text) else {
            return false;
        };
        let Signature {
            expires_s, reader, ..
        } = signature;
        let message = message(file, variant, *expires_s, reader);
        now_s < signature.expires_s && hmac::verify(&self.key, &message, &tag).is_ok()
    }
}

/// Returns bytes as text.
#[must_use]
pub fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn message(file: AttachmentId, variant: Variant, expires_s: u64, reader: &str) -> Vec<u8> {
    let mut message = file.0.as_bytes().to_vec();
    message.extend_from_slice(&expires_s.to_be_bytes());
    message.extend_from_slice(variant.name().as_bytes());
    message.extend_from_slice(reader.as_bytes());
    message
}

fn bytes_of(text: &str) -> Option<Vec<u8>> {
    let is_hex = text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
    if !is_hex {
        return None;
    }
    let pairs = (0..32).map(|at| u8::from_str_radix(&text[at * 2..at * 2 + 2], 16));
    pairs.collect::<Result<_, _>>().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_for_one_file_one_variant_and_some_minutes() {
        let signer = Signer::new(b"0123456789abcdef0123456789abcdef", 300);
        let (file, other) = (
            AttachmentId(uuid::Uuid::new_v4()),
            AttachmentId(uuid::Uuid::new_v4()),
        );
        let now = 1_000_000_100;
        let reader = signer.reader("alice");
        assert_eq!(reader.len(), 2 * READER_BYTES);
        let signed = signer.sign(file, Variant::Original, &reader, now);
        assert!((300..=600).contains(&(signed.expires_s - now)));
        assert_eq!(
            signed,
            signer.sign(file, Variant::Original, &reader, now + 99)
        );
        let valid = |signer: &Signer, file, variant, signed: &Signature, at| {
            signer.is_valid(file, variant, signed, at)
        };
        assert!(valid(&signer, file, Variant::Original, &signed, now));
        let last = signed.expires_s - 1;
        assert!(valid(&signer, file, Variant::Original, &signed, last));
        assert!(!valid(&signer, file, Variant::Original, &signed, last + 1));
        assert!(!valid(&signer, other, Variant::Original, &signed, now));
        assert!(!valid(&signer, file, Variant::Thumbnail, &signed, now));
        let later = Signature {
            expires_s: signed.expires_s + 300,
            ..signed.clone()
        };
        assert!(!valid(&signer, file, Variant::Original, &later, now));
        for reader in [signer.reader("bob"), String::new()] {
            let of_another = Signature {
                reader,
                ..signed.clone()
            };
            assert!(!valid(&signer, file, Variant::Original, &of_another, now));
        }
        for text in ["", "zz", &"é".repeat(32), &"0".repeat(64)] {
            let text = text.to_owned();
            let forged = Signature {
                text,
                ..signed.clone()
            };
            assert!(!valid(&signer, file, Variant::Original, &forged, now));
        }
        let another = Signer::new(b"another secret that is long enough", 300);
        assert!(!valid(&another, file, Variant::Original, &signed, now));
    }
}
