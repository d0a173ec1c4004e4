//! The TLS of the stores: version 1.3, with ring.
//!
//! The lists are those of rustls, without ChaCha20-Poly1305, which would add 50 KB. Every server
//! with TLS 1.3 has the other two cipher suites.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use cni::{Code, Error, Result};
use rustls::crypto::ring::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384};
use rustls::crypto::ring::{ALL_KX_GROUPS, sign};
use rustls::crypto::{CryptoProvider, GetRandomFailed, KeyProvider, SecureRandom, WebPkiSupportedAlgorithms};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::SigningKey;
use rustls::{ClientConfig, RootCertStore, SignatureScheme};
use webpki::ring as algorithm;

use crate::conf::{Conf, Credentials, read};

/// The signatures of certificates and handshakes.
static ALGORITHMS: WebPkiSupportedAlgorithms = WebPkiSupportedAlgorithms {
    all: webpki::ALL_VERIFICATION_ALGS,
    mapping: &[
        (SignatureScheme::ECDSA_NISTP384_SHA384, &[algorithm::ECDSA_P384_SHA384]),
        (SignatureScheme::ECDSA_NISTP256_SHA256, &[algorithm::ECDSA_P256_SHA256]),
        (SignatureScheme::ED25519, &[algorithm::ED25519]),
        (SignatureScheme::RSA_PSS_SHA512, &[algorithm::RSA_PSS_2048_8192_SHA512_LEGACY_KEY]),
        (SignatureScheme::RSA_PSS_SHA384, &[algorithm::RSA_PSS_2048_8192_SHA384_LEGACY_KEY]),
        (SignatureScheme::RSA_PSS_SHA256, &[algorithm::RSA_PSS_2048_8192_SHA256_LEGACY_KEY]),
        (SignatureScheme::RSA_PKCS1_SHA512, &[algorithm::RSA_PKCS1_2048_8192_SHA512]),
        (SignatureScheme::RSA_PKCS1_SHA384, &[algorithm::RSA_PKCS1_2048_8192_SHA384]),
        (SignatureScheme::RSA_PKCS1_SHA256, &[algorithm::RSA_PKCS1_2048_8192_SHA256]),
    ],
};

/// The source of random numbers, and the decoder of private keys.
#[derive(Debug)]
struct Ring;

impl SecureRandom for Ring {
    fn fill(&self, bytes: &mut [u8]) -> std::result::Result<(), GetRandomFailed> {
        getrandom::fill(bytes).map_err(|_| GetRandomFailed)
    }
}

impl KeyProvider for Ring {
    fn load_private_key(&self, key: PrivateKeyDer<'static>) -> std::result::Result<Arc<dyn SigningKey>, rustls::Error> {
        sign::any_supported_type(&key)
    }
}

/// Reads the certificates and the key that the node's file names.
///
/// # Errors
/// Code 5 if a file cannot be read, 7 if it does not have what it should have.
pub(crate) fn config(conf: &Conf) -> Result<Arc<ClientConfig>> {
    let wrong = |path: &Path, error: &dyn Display| Error::config(format!("{}: {error}", path.display()));
    let certificates = |path: &Path| {
        let found: Vec<_> = CertificateDer::pem_slice_iter(&read(path)?).flatten().collect();
        if found.is_empty() { Err(wrong(path, &"it has no certificate (PEM)")) } else { Ok(found) }
    };
    let mut roots = RootCertStore::empty();
    if roots.add_parsable_certificates(certificates(&conf.ca_file)?).0 == 0 {
        return Err(wrong(&conf.ca_file, &"its certificates cannot be used"));
    }
    let provider = CryptoProvider {
        cipher_suites: vec![TLS13_AES_256_GCM_SHA384, TLS13_AES_128_GCM_SHA256],
        kx_groups: ALL_KX_GROUPS.to_vec(),
        signature_verification_algorithms: ALGORITHMS,
        secure_random: &Ring,
        key_provider: &Ring,
    };
    let tls = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| Error::caused(Code::INTERNAL, "failed to set up TLS", error))?
        .with_root_certificates(roots);
    Ok(Arc::new(match &conf.credentials {
        Credentials::Certificate(cert, key) => {
            let private = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|error| wrong(key, &error))?;
            tls.with_client_auth_cert(certificates(cert)?, private).map_err(|error| wrong(cert, &error))?
        }
        Credentials::Token(_) => tls.with_no_client_auth(),
    }))
}
