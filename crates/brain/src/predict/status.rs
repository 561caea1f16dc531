//! What was learned, for people: every constant with its prior, its uncertainty and how much was
//! measured, and for each worker how it differs from its pool and how far predictions were off.

use serde::Serialize;

use super::Predictor;
use super::filter::{Average, Filter};
use crate::fleet::{Path, Role, Slot};
use crate::time::Time;

/// What was learned of one model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Calibration {
    /// Too little was measured to rely on.
    pub cold: bool,
    /// Output tokens that are expected of a request.
    pub expected_osl_tokens: f64,
    /// Requests that this rests on.
    pub osl_samples: u64,
    /// Every constant, by pool.
    pub constants: Vec<Constant>,
    /// Every worker.
    pub workers: Vec<WorkerCalibration>,
}

/// One constant of one pool.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Constant {
    /// The pool; `None` for links.
    pub pool: Option<Role>,
    /// Its name, as in the formulas.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// What it is taken to be.
    pub value: f64,
    /// One standard deviation of that.
    pub deviation: f64,
    /// Where it started.
    pub prior: f64,
    /// Measurements of the pool itself.
    pub samples: u64,
}

/// One worker, measured by its pool.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerCalibration {
    /// The worker.
    pub slot: Slot,
    /// Time to compute a prompt, as a multiple of what its pool takes.
    pub prefill_bias: f64,
    /// Measurements of that.
    pub prefill_samples: u64,
    /// How many of them its engine made.
    pub prefill_samples_of_engine: u64,
    /// Time of a decode step, as a multiple of what its pool takes.
    pub decode_bias: f64,
    /// Measurements of that.
    pub decode_samples: u64,
    /// How many of them its engine made.
    pub decode_samples_of_engine: u64,
    /// Prompts that it is taken to have and not to have computed.
    pub queued_prompts: usize,
    /// Seconds until these are computed.
    pub queue_seconds: f64,
    /// Sequences that stream from it.
    pub running: usize,
    /// Seconds of a decode step, with what is booked.
    pub step_seconds: f64,
    /// How far predicted TTFTs were off, by path.
    pub ttft_errors: [PathError; 2],
}

/// How far predicted TTFTs were off.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PathError {
    /// The path.
    pub path: Path,
    /// Mean of `|predicted / actual - 1|`, recent ones weighing more.
    pub relative_error: f64,
    /// First tokens that were seen.
    pub samples: u64,
}

const MS: f64 = 1e3;

impl Predictor {
    /// What was learned so far.
    pub(crate) fn calibration(&self, remote: bool, now: Time) -> Calibration {
        let profile = self.knowledge.profile();
        let mut constants = Vec::new();
        for role in [Role::Prefill, Role::Decode, Role::Unified] {
            if !self.desks.iter().flatten().any(|desk| desk.role == role) {
                continue;
            }
            let pool = self.knowledge.filters(role);
            let prefill =
                [("k0", profile.k0 * MS), ("a1", profile.a1 * MS), ("a2", profile.a2 * MS)];
            constants.extend(of_filter(Some(role), "ms", prefill, &pool.prefill));
            if role != Role::Prefill {
                let decode =
                    [("c0", profile.c0 * MS), ("c1", profile.c1 * MS), ("c2", profile.c2 * MS)];
                constants.extend(of_filter(Some(role), "ms", decode, &pool.decode));
            }
        }
        if remote {
            let per_token = profile.kv_bytes_per_token / profile.bandwidth * MS;
            let link = [("x0", profile.x0 * MS), ("token", per_token)];
            constants.extend(of_filter(None, "ms", link, self.knowledge.transfer()));
        }
        let osl = self.knowledge.osl_average();
        Calibration {
            cold: self.is_cold(remote),
            expected_osl_tokens: osl.value,
            osl_samples: osl.samples,
            constants,
            workers: self.worker_calibrations(now),
        }
    }

    fn worker_calibrations(&self, now: Time) -> Vec<WorkerCalibration> {
        let desks = (0..=u16::MAX).zip(&self.desks);
        let desks = desks.filter_map(|(slot, desk)| Some((Slot(slot), desk.as_ref()?)));
        let error = |path, average: Average| PathError {
            path,
            relative_error: average.value,
            samples: average.samples,
        };
        desks
            .map(|(slot, desk)| WorkerCalibration {
                slot,
                prefill_bias: desk.prefill_bias.value,
                prefill_samples: desk.prefill_bias.samples,
                prefill_samples_of_engine: desk.own_prefills,
                decode_bias: desk.decode_bias.value,
                decode_samples: desk.decode_bias.samples,
                decode_samples_of_engine: desk.own_decodes,
                queued_prompts: desk.queued(),
                queue_seconds: desk.wait(&self.constants(desk), now),
                running: desk.running.len(),
                step_seconds: self.step(slot),
                ttft_errors: [
                    error(Path::Remote, desk.errors[0]),
                    error(Path::Local, desk.errors[1]),
                ],
            })
            .collect()
    }
}

fn of_filter<const N: usize>(
    pool: Option<Role>,
    unit: &'static str,
    priors: [(&'static str, f64); N],
    filter: &Filter<N>,
) -> Vec<Constant> {
    let learned = filter.theta().into_iter().zip(filter.deviation());
    let constants = priors.into_iter().zip(learned);
    constants
        .map(|((name, prior), (theta, deviation))| Constant {
            pool,
            name,
            unit,
            value: prior * theta,
            deviation: prior * deviation,
            prior,
            samples: filter.samples(),
        })
        .collect()
}
