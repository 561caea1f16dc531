//! What was measured of the engines, kept in a file over a restart.
//!
//! Invariants: the file is replaced as a whole, never written in place; one that is missing, broken,
//! too large or of other constants is a warning and a start from the priors, never a failure.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::sync::Arc;

use pointsman_brain::Learned;
use serde::{Deserialize, Serialize};

use crate::router::Router;

/// Bytes of a file that are read: a model takes about two thousand.
const MAX_BYTES: u64 = 4 * 1024 * 1024;

/// What the file holds.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Kept {
    models: BTreeMap<String, Learned>,
}

/// Takes over what an earlier process measured, where a file is configured.
pub(crate) fn restore(router: &Router) {
    let Some(file) = &router.settings.calibration else { return };
    let path = file.path.display();
    let kept = match load(&file.path) {
        Ok(kept) => kept,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => {
            tracing::warn!(%path, %error, "what was measured before is not used");
            return;
        }
    };
    for group in &router.fleet.groups {
        let Some(learned) = kept.models.get(group.name()) else { continue };
        match group.brain().restore(learned) {
            Ok(()) => tracing::info!(model = group.name(), %path, "measured before, taken over"),
            Err(error) => {
                tracing::warn!(model = group.name(), %path, %error, "what was measured before is not used");
            }
        }
    }
}

/// Writes the file now and then until the router stops.
pub(crate) async fn keep(router: Arc<Router>) {
    let Some(file) = router.settings.calibration.clone() else { return };
    loop {
        tokio::select! {
            () = router.stop.cancelled() => return,
            () = tokio::time::sleep(file.every) => {}
        }
        let router = Arc::clone(&router);
        // A panic has been reported already; the next turn writes again.
        let _written = tokio::task::spawn_blocking(move || save(&router)).await;
    }
}

/// Writes the file, where one is configured.
pub(crate) fn save(router: &Router) {
    let Some(file) = &router.settings.calibration else { return };
    let learned =
        |group: &Arc<crate::fleet::Group>| (group.name().to_owned(), group.brain().learned());
    let kept = Kept { models: router.fleet.groups.iter().map(learned).collect() };
    if let Err(error) = store(&file.path, &kept) {
        let path = file.path.display();
        tracing::warn!(%path, %error, "what was measured cannot be kept; see `calibration.state_file`");
    }
}

fn load(path: &Path) -> io::Result<Kept> {
    let mut text = Vec::new();
    let file = std::fs::File::open(path)?;
    if file.take(MAX_BYTES + 1).read_to_end(&mut text)? as u64 > MAX_BYTES {
        return Err(io::Error::other("it is too large to be ours"));
    }
    serde_json::from_slice(&text).map_err(io::Error::from)
}

fn store(path: &Path, kept: &Kept) -> io::Result<()> {
    let text = serde_json::to_vec(kept)?;
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.new", std::process::id()));
    let written = std::fs::File::create(&beside).and_then(|mut file| {
        file.write_all(&text)?;
        file.sync_all()
    });
    let replaced = written.and_then(|()| std::fs::rename(&beside, path));
    if replaced.is_err() {
        // Best effort: it is of no use to anybody.
        let _gone = std::fs::remove_file(&beside);
    }
    replaced
}
