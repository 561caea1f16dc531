//! The field of one request: the candidates of its pool, and the cheapest of each kind.
//! Local candidates are those that can prefill locally; remote pairs are any prefill candidate with
//! any decode candidate. The cost of a pair is the sum of its two, so that the cheapest pair is the
//! cheapest of each; a policy that scores candidates otherwise finds all of them here.

use crate::candidates::Candidate;
use crate::cost;
use crate::fleet::{Role, Slot};
use crate::gate::Pool;
use crate::random::Random;
use crate::settings::Settings;

/// Random numbers from 0 to 1 for sampling by temperature. One serves the local path and the decode
/// leg, so that both fall on the same worker where they have the same candidates.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Draws {
    decode: f64,
    prefill: f64,
    ties: f64,
}

impl Draws {
    /// Draws nothing where nothing is needed.
    pub(crate) fn new(settings: &Settings, random: &mut Random) -> Draws {
        let mut draws = Draws::default();
        if settings.cost.temperature.get() > 0.0 {
            draws = Draws { decode: random.unit(), prefill: random.unit(), ..draws };
        }
        if settings.predicts() {
            draws.ties = random.unit();
        }
        draws
    }

    /// For equally good workers that stream.
    pub(crate) fn decode_tie(&self) -> f64 {
        self.ties
    }

    /// For equally good workers that compute; further digits of the same number.
    pub(crate) fn prefill_tie(&self) -> f64 {
        (self.ties * 4096.0).fract()
    }

    /// For equally good paths; further digits of the same number.
    pub(crate) fn path_tie(&self) -> f64 {
        (self.ties * 16_777_216.0).fract()
    }
}

/// What a request can be given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field<'a> {
    candidates: &'a [Candidate],
    pool: Pool,
    /// The local candidate to take.
    pub(crate) local: Option<Candidate>,
    /// The prefill candidate to take.
    pub(crate) prefill: Option<Candidate>,
    /// The decode candidate to take for the remote path.
    pub(crate) decode: Option<Candidate>,
}

impl<'a> Field<'a> {
    pub(crate) fn new(
        candidates: &'a [Candidate],
        pool: Pool,
        settings: &Settings,
        draws: Draws,
    ) -> Field<'a> {
        let temperature = settings.cost.temperature.get();
        let prefills =
            |candidate: &Candidate| candidate.role == Role::Prefill && pool.has(candidate.role);
        let decodes = |candidate: &Candidate| candidate.fetches && pool.has(candidate.role);
        let locals = |candidate: &Candidate| candidate.local && pool.has(candidate.role);
        let cost = |candidate: &Candidate| candidate.cost;
        let fetch = |candidate: &Candidate| candidate.fetch_cost;
        Field {
            candidates,
            pool,
            local: cost::pick(candidates, temperature, draws.decode, cost, locals),
            prefill: cost::pick(candidates, temperature, draws.prefill, cost, prefills),
            decode: cost::pick(candidates, temperature, draws.decode, fetch, decodes),
        }
    }

    /// Every candidate of the pool, by slot.
    pub(crate) fn candidates(&self) -> impl Iterator<Item = &'a Candidate> {
        let pool = self.pool;
        self.candidates.iter().filter(move |candidate| pool.has(candidate.role))
    }

    pub(crate) fn find(&self, slot: Slot) -> Option<&'a Candidate> {
        self.candidates().find(|candidate| candidate.slot == slot)
    }
}
