//! The encryption of a push message for a browser (RFC 8291), in the encoding aes128gcm (RFC 8188).

use aws_lc_rs::{
    aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    agreement::{ECDH_P256, PrivateKey, UnparsedPublicKey, agree},
    hkdf::{HKDF_SHA256, KeyType, Salt},
};

use super::subscription::ReceiverKeys;

/// Bytes of a plaintext. Push services take messages of 4,096 bytes, of which the encryption takes 103.
const PLAINTEXT_BYTES_MAX: usize = 3_000;
/// Bytes of a record. The message is the only one.
const RECORD_BYTES: u32 = 4_096;
/// The byte after the plaintext of the last record.
const LAST_RECORD: u8 = 2;

/// Encrypts a message. `None` if it is too long, or the browser's key is not a point on the curve.
pub(super) fn encrypt(receiver: &ReceiverKeys, plaintext: &[u8]) -> Option<Vec<u8>> {
    let sender = PrivateKey::generate(&ECDH_P256).ok()?;
    encrypt_with(receiver, plaintext, &sender, rand::random())
}

/// Encrypts with a given key and salt. Each pair of them is for one message only.
fn encrypt_with(
    receiver: &ReceiverKeys,
    plaintext: &[u8],
    sender: &PrivateKey,
    salt: [u8; 16],
) -> Option<Vec<u8>> {
    if plaintext.len() > PLAINTEXT_BYTES_MAX {
        return None;
    }
    let public = sender.compute_public_key().ok()?;
    let (public, theirs) = (public.as_ref(), &receiver.p256dh[..]);
    let peer = UnparsedPublicKey::new(&ECDH_P256, theirs);
    let input: [u8; 32] = agree(sender, peer, (), |shared| {
        let info: [&[u8]; 3] = [b"WebPush: info\0", theirs, public];
        derive(&receiver.auth, shared, &info).ok_or(())
    })
    .ok()?;
    let key: [u8; 16] = derive(&salt, &input, &[b"Content-Encoding: aes128gcm\0"])?;
    let nonce: [u8; NONCE_LEN] = derive(&salt, &input, &[b"Content-Encoding: nonce\0"])?;
    let mut record = plaintext.to_vec();
    record.push(LAST_RECORD);
    LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &key).ok()?)
        .seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::empty(),
            &mut record,
        )
        .ok()?;
    let mut message = salt.to_vec();
    message.extend_from_slice(&RECORD_BYTES.to_be_bytes());
    message.push(u8::try_from(public.len()).ok()?);
    message.extend_from_slice(public);
    message.append(&mut record);
    Some(message)
}

/// Derives `N` bytes from a secret by HKDF with SHA-256.
fn derive<const N: usize>(salt: &[u8], secret: &[u8], info: &[&[u8]]) -> Option<[u8; N]> {
    struct Bytes(usize);
    impl KeyType for Bytes {
        fn len(&self) -> usize {
            self.0
        }
    }
    let mut derived = [0; N];
    let key = Salt::new(HKDF_SHA256, salt).extract(secret);
    key.expand(info, Bytes(N)).ok()?.fill(&mut derived).ok()?;
    Some(derived)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consumers::push::web::base64;

    /// The browser of RFC 8291, appendix A.
    fn receiver() -> ReceiverKeys {
        let p256dh = "BCVxsr7N_eNgVRqvHtD0zTZsEc6-VV-JvLexhqUzORcxaOzi6-AYWXvTBHm4bjyPjs7Vd8pZGH6SRpkNtoIAiw4";
        ReceiverKeys {
            p256dh: base64(p256dh).unwrap().try_into().unwrap(),
            auth: base64("BTBZMqHH6r4Tts7J_aSIgg")
                .unwrap()
                .try_into()
                .unwrap(),
        }
    }

    #[test]
    fn the_example_of_the_rfc_is_encrypted_as_there() {
        let sender = base64("yfWPiYE-n46HLnH0KqZOF1fJJU3MYrct3AELtAQ-oRw").unwrap();
        let sender = PrivateKey::from_private_key(&ECDH_P256, &sender).unwrap();
        let salt = base64("DGv6ra1nlYgDCS1FRnbzlw")
            .unwrap()
            .try_into()
            .unwrap();
        let text = b"When I grow up, I want to be a watermelon";
        let message = encrypt_with(&receiver(), text, &sender, salt).unwrap();
        let expected = "DGv6ra1nlYgDCS1FRnbzlwAAEABBBP4z9KsN6nGRTbVYI_c7VJSPQTBtkgcy27mlmlMoZIIgDll6e3vCYLocInmYWAmS6Tlz\
                        AC8wEqKK6PBru3jl7A_yl95bQpu6cVPTpK4Mqgkf1CXztLVBSt2Ks3oZwbuwXPXLWyouBWLVWGNWQexSgSxsj_Qulcy4a-fN";
        assert_eq!(message, base64(expected).unwrap());
    }

    #[test]
    fn each_message_has_its_own_key_and_salt() {
        let [one, other] = [(); 2].map(|()| encrypt(&receiver(), b"text").unwrap());
        assert_ne!(one[..16], other[..16]);
        assert_ne!(one[21..86], other[21..86]);
        assert_eq!(one.len(), 16 + 4 + 1 + 65 + b"text".len() + 1 + 16);
    }

    #[test]
    fn a_message_has_a_maximum_of_bytes() {
        let longest = encrypt(&receiver(), &[7; PLAINTEXT_BYTES_MAX]).unwrap();
        assert!(longest.len() <= 4_096);
        assert!(encrypt(&receiver(), &[7; PLAINTEXT_BYTES_MAX + 1]).is_none());
        let mut off_the_curve = receiver();
        off_the_curve.p256dh[40] ^= 1;
        assert!(encrypt(&off_the_curve, b"text").is_none());
    }
}
