//! Certificates of a test cluster: one authority, and what it signs.

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// A certificate and its key, as PEM.
#[derive(Clone, Debug)]
pub(super) struct Signed {
    pub(super) certificate: String,
    pub(super) key: String,
}

/// The authority of one cluster.
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(super) certificate: String,
}

impl Authority {
    pub(super) fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "test cluster");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), certificate })
    }

    /// The API server's certificate for itself.
    pub(super) fn server(&self) -> Result<Signed> {
        let names = ["127.0.0.1", "10.96.0.1", "localhost", "kubernetes.default.svc"];
        let params = CertificateParams::new(names.map(String::from))?;
        self.sign(params, "kube-apiserver", ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// A user: the common name is its name, the organisation its group.
    pub(super) fn client(&self, user: &str, group: Option<&str>) -> Result<Signed> {
        let mut params = CertificateParams::default();
        if let Some(group) = group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        self.sign(params, user, ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn sign(
        &self,
        mut params: CertificateParams,
        name: &str,
        usage: ExtendedKeyUsagePurpose,
    ) -> Result<Signed> {
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Signed { certificate, key: key.serialize_pem() })
    }
}

/// The key pair that signs service accounts' tokens: private and public half, as PEM.
pub(super) fn token_key() -> Result<(String, String)> {
    let key = KeyPair::generate()?;
    Ok((key.serialize_pem(), key.public_key_pem()))
}
