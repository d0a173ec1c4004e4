//! Certificates for tests, made by the program openssl.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use tempfile::TempDir;

/// The configuration of openssl.
const CONF: &str = "[req]
distinguished_name = none
[none]
[ca]
default_ca = authority
[authority]
certificate = ca.crt
private_key = ca.key
database = index
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = policy
copy_extensions = copy
[policy]
organizationName = optional
commonName = supplied
";

/// A certificate authority. Its files exist until it is dropped.
#[derive(Debug)]
pub struct Authority {
    folder: TempDir,
    issued: AtomicUsize,
}

impl Authority {
    /// Creates an authority.
    ///
    /// # Panics
    /// If openssl cannot be run or fails.
    #[expect(clippy::new_without_default, reason = "creating it has side effects")]
    pub fn new() -> Authority {
        let authority = Authority { folder: tempfile::tempdir().unwrap(), issued: AtomicUsize::new(0) };
        fs::write(authority.path("conf"), CONF).unwrap();
        authority.request("/CN=authority", &["-addext", "basicConstraints=critical,CA:TRUE"], "ca.crt", "ca.key");
        authority
    }

    /// Returns the file of the authority's certificate.
    pub fn ca_file(&self) -> PathBuf {
        self.path("ca.crt")
    }

    /// Returns the folder of all files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Issues a certificate for this subject, such as `/O=system:nodes/CN=system:node:node1`, that
    /// is valid for a client, and for a server at these addresses and names (`IP:127.0.0.1`).
    /// Returns a file with the certificate and its key.
    ///
    /// # Panics
    /// If openssl cannot be run or fails.
    pub fn issue(&self, subject: &str, names: &str) -> PathBuf {
        let number = self.issued.fetch_add(1, Ordering::Relaxed);
        let (crt, key) = (format!("{number}.crt"), format!("{number}.key"));
        let (ca_crt, ca_key) = (self.path("ca.crt"), self.path("ca.key"));
        let names = format!("subjectAltName={names}");
        let mut extensions = vec!["-CA", ca_crt.to_str().unwrap(), "-CAkey", ca_key.to_str().unwrap()];
        extensions.extend(["-addext", "basicConstraints=CA:FALSE", "-addext", &names]);
        self.request(subject, &extensions, &crt, &key);
        let both = self.path(&format!("{number}.pem"));
        fs::write(&both, [fs::read(self.path(&crt)).unwrap(), fs::read(self.path(&key)).unwrap()].concat()).unwrap();
        both
    }

    /// Replaces the certificate in a file of [`issue`](Authority::issue) by one that expired in
    /// 2020.
    ///
    /// # Panics
    /// If openssl cannot be run or fails.
    pub fn expire(&self, file: &Path) {
        let path = file.to_str().unwrap();
        fs::write(self.path("index"), "").unwrap();
        self.openssl(&[
            "x509",
            "-x509toreq",
            "-copy_extensions",
            "copyall",
            "-in",
            path,
            "-signkey",
            path,
            "-out",
            "csr",
        ]);
        let dates = ["-startdate", "20200101000000Z", "-enddate", "20200102000000Z"];
        self.openssl(
            &[&["ca", "-batch", "-notext", "-config", "conf", "-in", "csr", "-out", "expired"], &dates[..]].concat(),
        );
        let both = fs::read_to_string(file).unwrap();
        let (_, key) = both.split_once("-----BEGIN PRIVATE").unwrap();
        let certificate = fs::read_to_string(self.path("expired")).unwrap();
        fs::write(file, format!("{certificate}-----BEGIN PRIVATE{key}")).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Creates a key and its certificate.
    fn request(&self, subject: &str, extensions: &[&str], crt: &str, key: &str) {
        let new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "2"];
        let named = ["-subj", subject, "-config", "conf", "-out", crt, "-keyout", key];
        self.openssl(&[&new[..], &named, extensions].concat());
    }

    fn openssl(&self, args: &[&str]) {
        let output = Command::new("openssl").args(args).current_dir(self.folder.path()).output();
        let output = output.expect("to run openssl");
        assert!(output.status.success(), "openssl {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
