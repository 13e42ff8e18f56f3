"""Certificates that have signed themselves, for servers and clients of the tests."""
import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


def pem(private):
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def certificate(stem, name, hosts=()):
    """Writes the certificate of a name to `stem`.pem and its key to `stem`.key, and returns both paths."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    who, day = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(who, who, key.public_key(), x509.random_serial_number(), now - day, now + day)
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    paths = [stem.with_suffix(".pem"), stem.with_suffix(".key")]
    paths[0].write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    paths[1].write_text(pem(key))
    return paths
