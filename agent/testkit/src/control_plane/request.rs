//! One blocking HTTPS request, for setting a control plane up. Tests have clients of their own.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddrV4, TcpStream};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;

use super::pki::Signed;
use crate::wait::HANG;

/// A client of one API server.
#[derive(Debug)]
pub(super) struct Https {
    address: SocketAddrV4,
    tls: Arc<ClientConfig>,
}

impl Https {
    /// As `who`, trusting `authority` (PEM).
    pub(super) fn new(address: SocketAddrV4, authority: &str, who: &Signed) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.as_bytes())?)?;
        let chain = vec![CertificateDer::from_pem_slice(who.certificate.as_bytes())?];
        let key = PrivateKeyDer::from_pem_slice(who.key.as_bytes())?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)?;
        Ok(Self { address, tls: Arc::new(tls) })
    }

    /// Status and body of the answer. HTTP/1.0, so the body ends with the connection.
    pub(super) fn send(&self, method: &str, path: &str, body: &str) -> Result<(u16, String)> {
        let stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(HANG))?;
        let name = ServerName::try_from("127.0.0.1").context("an address is a name")?;
        let mut stream = StreamOwned::new(ClientConnection::new(Arc::clone(&self.tls), name)?, stream);
        write!(
            stream,
            "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nAccept: application/json\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("an answer without a body")?;
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no HTTP status")?;
        Ok((code, body.to_owned()))
    }

    /// Sends an object; gives what the server made of it.
    pub(super) fn post(&self, path: &str, object: &Value) -> Result<Value> {
        match self.send("POST", path, &object.to_string())? {
            (200..=299, body) => Ok(serde_json::from_str(&body)?),
            (code, body) => bail!("POST {path}: {code}: {body}"),
        }
    }
}
