//! Certificates, keys of clients, and the listener for administration.

use std::net::SocketAddr;
use std::num::NonZeroU32;

use super::Resolver;
use crate::settings::{AdminListen, ClientKey, KeyHash, ListenTls, UpstreamTls};
use crate::tree::Key;
use crate::written::{self, Written};

const HASH: &str = "64 hexadecimal digits, as `pointsman key` prints them";

/// What was found.
pub(super) struct Security {
    pub(super) auth: Option<Vec<ClientKey>>,
    pub(super) admin: Option<AdminListen>,
    pub(super) admin_key: Option<KeyHash>,
    pub(super) upstream: UpstreamTls,
}

impl Resolver<'_> {
    pub(super) fn security(&mut self, written: &Written) -> Security {
        let admin_key =
            written.admin.key_sha256.as_deref().and_then(|text| {
                self.key_hash(&Key::root().name("admin").name("key_sha256"), text)
            });
        let admin = written.admin.listen.as_ref().map(|listen| AdminListen {
            addr: SocketAddr::new(listen.address, listen.port),
            tls: listen.tls.as_ref().map(listen_tls),
        });
        if admin.as_ref().is_some_and(|admin| {
            admin.addr.port() != 0
                && admin.addr.port() == written.listen.port
                && admin.addr.ip() == written.listen.address
        }) {
            let message = "is that of `listen` too; must be another";
            self.problem(&Key::root().name("admin").name("listen").name("port"), message);
        }
        Security {
            auth: written.auth.as_ref().map(|auth| self.client_keys(&auth.keys)),
            admin,
            admin_key,
            upstream: self.upstream_tls(&written.upstream.tls),
        }
    }

    fn client_keys(&mut self, written: &[written::ClientKey]) -> Vec<ClientKey> {
        let keys = Key::root().name("auth").name("keys");
        if written.is_empty() {
            self.problem(&keys, "empty; must hold a key, or `auth` be left out");
        }
        let mut resolved: Vec<ClientKey> = Vec::new();
        for (i, key) in written.iter().enumerate() {
            let at = keys.index(i);
            if key.name.trim().is_empty() {
                self.problem(&at.name("name"), "empty; must be a name");
            }
            if resolved.iter().any(|other| other.name == key.name) {
                self.problem(&at.name("name"), "another key has that name; must be unique");
            }
            let Some(sha256) = self.key_hash(&at.name("sha256"), &key.sha256) else { continue };
            if let Some(other) = resolved.iter().find(|other| other.sha256 == sha256) {
                let message = format!("is that of key `{}` too; must be unique", other.name);
                self.problem(&at.name("sha256"), message);
            }
            resolved.push(ClientKey {
                name: key.name.clone(),
                sha256,
                models: key.models.clone(),
                requests_per_minute: key.requests_per_minute.and_then(NonZeroU32::new),
                tokens_per_minute: key.tokens_per_minute.and_then(NonZeroU32::new),
                max_in_flight: key.max_in_flight.and_then(NonZeroU32::new),
                max_priority: key.max_priority,
            });
        }
        resolved
    }

    /// What is wrong is not shown: it may be a key where its hash should be.
    fn key_hash(&mut self, key: &Key, text: &str) -> Option<KeyHash> {
        let hash = parse_hash(text.trim());
        if hash.is_none() {
            self.problem(key, format!("is no hash of a key; must be {HASH}"));
        }
        hash
    }

    fn upstream_tls(&mut self, written: &written::UpstreamTls) -> UpstreamTls {
        let tls = Key::root().name("upstream").name("tls");
        let identity = match (&written.certificate, &written.key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((certificate.into(), key.into())),
            (Some(_), None) => {
                self.problem(&tls.name("key"), "missing; `certificate` needs it");
                None
            }
            (None, Some(_)) => {
                self.problem(&tls.name("certificate"), "missing; `key` needs it");
                None
            }
        };
        UpstreamTls { ca: written.ca.as_ref().map(Into::into), identity }
    }
}

pub(super) fn listen_tls(written: &written::ListenTls) -> ListenTls {
    ListenTls {
        certificate: (&written.certificate).into(),
        key: (&written.key).into(),
        client_ca: written.client_ca.as_ref().map(Into::into),
    }
}

fn parse_hash(text: &str) -> Option<KeyHash> {
    let mut hash = KeyHash::default();
    let right = text.len() == 2 * hash.len() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !right {
        return None;
    }
    for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(hash)
}
