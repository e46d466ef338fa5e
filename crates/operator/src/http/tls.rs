//! The operator's own certificate authority.
//!
//! **Problem.** Node agents and the API server must know that they talk to the operator. The operator has no
//! right to read or write Secrets, so it cannot keep a key at the API server, and a cluster may have no
//! certificate machinery.
//!
//! **How.** The authority's key is read from the first of some folders that has one (a mounted Secret, if the
//! chart made one; a volume that lives as long as the pod), or made and kept in the first folder that can be
//! written. Only the public certificate leaves the process: it is published for node agents and for the
//! webhook. The serving certificate is made at each start and never stored.
//!
//! **Validity.** An authority that the operator makes, and every serving certificate, is valid from 2025 until
//! 2099: a process that runs for months never has to renew, and trust ends with the published authority, not
//! with a date. The chart's authority is valid for ten years. To rotate: delete the Secret (or the folder's
//! files) and restart the operator; it publishes the new authority, and node agents read the published
//! certificate again when it changes.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CERTIFICATE_FILE: &str = "tls.crt";
const KEY_FILE: &str = "tls.key";

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot {action} {path}: {source}; remove the file to have a new authority made")]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("the certificate authority in {folder} cannot be used: {source}; remove it to have a new one made")]
    Authority { folder: PathBuf, source: rcgen::Error },
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    #[error("cannot serve TLS with the certificate that was made: {0}")]
    Serve(#[from] rustls::Error),
}

/// Signs the operator's serving certificates.
pub struct Authority {
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// The authority kept in one of the folders, or a new one, kept in the first that can be written (or in
    /// none: then it lives as long as the process).
    pub fn load_or_make(folders: &[PathBuf]) -> Result<Authority, TlsError> {
        for folder in folders {
            let (certificate, key) = (folder.join(CERTIFICATE_FILE), folder.join(KEY_FILE));
            if certificate.exists() && key.exists() {
                let certificate_pem = read(&certificate)?;
                return Authority::of(certificate_pem, &read(&key)?)
                    .map_err(|source| TlsError::Authority { folder: folder.clone(), source });
            }
        }
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "gainshare operator");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.not_before = rcgen::date_time_ymd(2025, 1, 1);
        params.not_after = rcgen::date_time_ymd(2099, 1, 1);
        let certificate_pem = params.self_signed(&key)?.pem();
        let key_pem = key.serialize_pem();
        if !folders.iter().any(|folder| keep(folder, &certificate_pem, &key_pem).is_ok()) {
            tracing::info!(
                "the certificate authority is in memory only: node agents trust a restarted operator when they have read its new one"
            );
        }
        Ok(Authority::of(certificate_pem, &key_pem)?)
    }

    fn of(certificate_pem: String, key_pem: &str) -> Result<Authority, rcgen::Error> {
        let issuer = Issuer::from_ca_cert_pem(&certificate_pem, KeyPair::from_pem(key_pem)?)?;
        Ok(Authority { certificate_pem, issuer })
    }

    /// The public certificate, which others trust.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// A new serving certificate for these names.
    pub fn server_config(&self, names: &[String]) -> Result<Arc<rustls::ServerConfig>, TlsError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names.to_vec())?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, names.first().map_or("gainshare", String::as_str));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        params.not_before = rcgen::date_time_ymd(2025, 1, 1);
        params.not_after = rcgen::date_time_ymd(2099, 1, 1);
        let certificate: CertificateDer<'static> = params.signed_by(&key, &self.issuer)?.into();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

fn read(path: &Path) -> Result<String, TlsError> {
    fs::read_to_string(path).map_err(|source| TlsError::File { action: "read", path: path.to_owned(), source })
}

/// Keeps the pair in a folder; the key is readable by its owner only.
fn keep(folder: &Path, certificate_pem: &str, key_pem: &str) -> Result<(), TlsError> {
    let write = |name: &str, text: &str, mode: u32| {
        let path = folder.join(name);
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|source| TlsError::File {
            action: "write",
            path,
            source,
        })
    };
    write(KEY_FILE, key_pem, 0o600)?;
    write(CERTIFICATE_FILE, certificate_pem, 0o644)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn an_authority_is_kept_and_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let folders = [PathBuf::from("/nonexistent/secret"), folder.path().to_owned()];
        let first = Authority::load_or_make(&folders).unwrap();
        let again = Authority::load_or_make(&folders).unwrap();
        assert_eq!(first.certificate_pem(), again.certificate_pem());
        let mode = fs::metadata(folder.path().join(KEY_FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        again.server_config(&["gainshare-operator.gainshare.svc".to_owned()]).unwrap();
    }

    #[test]
    fn without_a_folder_it_lives_in_memory() {
        let one = Authority::load_or_make(&[]).unwrap();
        let other = Authority::load_or_make(&[]).unwrap();
        assert_ne!(one.certificate_pem(), other.certificate_pem());
    }

    #[test]
    fn garbage_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(CERTIFICATE_FILE), "not a certificate").unwrap();
        fs::write(folder.path().join(KEY_FILE), "not a key").unwrap();
        let error = Authority::load_or_make(&[folder.path().to_owned()]).err().unwrap().to_string();
        assert!(error.contains("cannot be used") && error.contains("remove it"), "{error}");
    }
}
