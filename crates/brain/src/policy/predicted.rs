//! `predicted`: every local candidate and every pair (p, d) is scored, and the lowest J wins.
//! `TTFT_local(d) = W_d + T_pf(u_d) + (m + queued chunks)(c1 B + c2 S) + [B > 0] t_dec/2`
//! `TTFT_remote(p, d) = W_p + T_pf(u_p) + X(u_d) + t_dec(d)`
//! `J = s(TTFT/S_T - 1) + 0.3 l(TTFT/S_T) + s(ITL/S_I - 1) + [local] harm(d)`, `s(x) = 1/(1 + exp(-x/0.1))`,
//! `l(x) = min(x, 1) + 0.1 max(x - 1, 0)`: what is late for its SLO is not to harm others for its own sake.
//! The terms are in `predict::physics`, `harm` in `predict::running`; where an SLO is missing, below.

use crate::candidates::Candidate;
use crate::field::Field;
use crate::fleet::Role;
use crate::guards::Vetoes;
use crate::plan::Scene;
use crate::policy::Rule;
use crate::predict::{Outlook, Setting};
use crate::signals::Fallbacks;
use crate::units::Factor;

/// Width of `s`, and while too little was measured.
const WIDTH: f64 = 0.1;
const COLD_WIDTH: f64 = 0.3;

/// Weight of TTFT itself, beside that of what it does to its SLO.
const TTFT_SLOPE: f64 = 0.3;

/// What TTFT beyond its SLO counts there: the SLO is lost, and being later loses little more.
const LATE: f64 = 0.1;

/// Scores within this share of the best are equal.
const TIE: f64 = 0.01;

/// Equal candidates of one kind among which one is drawn; further ones stand back.
const MAX_TIED: usize = 16;

/// Local candidates whose harm is worked out at most: those with the least J before it. Of like
/// workers one of a few is as good as any: replays on 8p8d serve as many in time as with 32.
const MAX_JUDGED: usize = 4;

/// While too little was measured, paths that differ by less than this in J are for the cold policy.
pub(crate) const COLD_MARGIN: f64 = 0.05;

/// Parameters of `predicted`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predicted {
    /// Taken off J of the path that the session's last turn took.
    pub stickiness: Factor,
    /// Weight of one second of delay of a running sequence that has no SLO.
    pub lambda: Factor,
    /// Whether a request that is late for its TTFT SLO whatever is done waits in the router.
    pub hold_late: bool,
    /// Decides close cases while too little was measured; `predicted` itself leaves them to J.
    pub cold: Rule,
}

impl Default for Predicted {
    fn default() -> Self {
        const STICKINESS: Factor = Factor::constant(0.03);
        const LAMBDA: Factor = Factor::constant(0.1);
        let load = super::PrefillLoad { prefill_busy_threshold: Factor::ONE };
        Predicted {
            stickiness: STICKINESS,
            lambda: LAMBDA,
            hold_late: true,
            cold: Rule::IslOrLoad(super::IslBounding::default(), load),
        }
    }
}

/// What a way to serve a request is predicted to be like.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Score {
    /// Time to first token, in seconds.
    pub ttft_seconds: f64,
    /// Mean time between tokens, in seconds.
    pub itl_seconds: f64,
    /// J: lower is better.
    pub j: f64,
}

/// The best of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Scores {
    /// The best local candidate that no guard vetoes.
    pub local: Option<Score>,
    /// The best pair.
    pub remote: Option<Score>,
    /// Too little was measured to rely on.
    pub cold: bool,
}

/// The best of each kind, with its workers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scored {
    pub(crate) local: Option<Candidate>,
    pub(crate) remote: Option<(Candidate, Candidate)>,
    pub(crate) scores: Scores,
    /// Guards that vetoed local candidates which might have been the best.
    pub(crate) vetoes: Vetoes,
    /// What the guards had to do without.
    pub(crate) fallbacks: Fallbacks,
}

/// Scores every candidate of the field, and draws among equal ones.
pub(crate) fn score(scene: &Scene<'_>, field: &Field<'_>, remote: bool) -> Scored {
    let scorer = Scorer::new(scene, remote);
    let mut scored = Scored::default();
    scored.scores.cold = scorer.cold;
    if remote && let Some((pair, score)) = scorer.best_pair(field) {
        (scored.remote, scored.scores.remote) = (Some(pair), Some(score));
    }
    scorer.best_local(field, &mut scored);
    scored
}

/// What is the same for every candidate of one request.
struct Scorer<'a> {
    scene: &'a Scene<'a>,
    ttft_slo: Option<f64>,
    itl_slo: Option<f64>,
    width: f64,
    cold: bool,
    now: f64,
    /// Seconds that are part of its TTFT already.
    waited: f64,
}

impl<'a> Scorer<'a> {
    fn new(scene: &'a Scene<'a>, remote: bool) -> Scorer<'a> {
        let slo = scene.slo();
        let cold = scene.predictor.is_cold(remote);
        Scorer {
            scene,
            ttft_slo: slo.ttft_seconds(),
            itl_slo: slo.itl_seconds(),
            width: if cold { COLD_WIDTH } else { WIDTH },
            cold,
            now: scene.now.0 as f64 * 1e-9,
            waited: scene.ask.waited.as_secs_f64(),
        }
    }

    fn s(&self, x: f64) -> f64 {
        1.0 / (1.0 + (-x / self.width).exp())
    }

    /// J without harm. Without S_T, TTFT counts in seconds; without S_I, ITL does not count.
    fn own(&self, ttft: f64, itl: f64) -> f64 {
        let lost = |time: f64, slo: Option<f64>| slo.map_or(0.0, |slo| self.s(time / slo - 1.0));
        self.waiting(ttft) + lost(self.waited + ttft, self.ttft_slo) + lost(itl, self.itl_slo)
    }

    /// What TTFT adds to J at least, besides what it does to its SLO. Grows with it.
    fn waiting(&self, ttft: f64) -> f64 {
        let Some(slo) = self.ttft_slo else { return ttft };
        let x = (self.waited + ttft) / slo;
        TTFT_SLOPE * (x.min(1.0) + LATE * (x - 1.0).max(0.0))
    }

    /// The best pair. J grows with TTFT, and TTFT is a sum of what p and what d adds: so the best p
    /// is the same for every d, and no other pair has to be looked at.
    fn best_pair(&self, field: &Field<'_>) -> Option<((Candidate, Candidate), Score)> {
        let prefills = || field.candidates().filter(|c| c.role == Role::Prefill);
        let least = prefills().map(|c| c.outlook.computed()).fold(f64::INFINITY, f64::min);
        let times = |computed: f64, d: &Outlook| {
            (computed + d.joined(), self.scene.predictor.remote_itl(d))
        };
        let mut decodes = Tied::beyond(self.own(least, 0.0));
        for candidate in field.candidates().filter(|c| c.fetches) {
            let (ttft, itl) = times(least, &candidate.outlook);
            if !decodes.beats(ttft, itl, |ttft| self.waiting(ttft)) && self.scene.fits(candidate) {
                decodes.offer(self.score(ttft, itl), candidate);
            }
        }
        let (_, decode) = decodes.draw(self.scene.draws.decode_tie())?;
        let (joined, itl) = times(0.0, &decode.outlook);
        let mut computing = Tied::beyond(self.own(joined, itl));
        for candidate in prefills() {
            let ttft = candidate.outlook.computed() + joined;
            if !computing.beats(ttft, itl, |ttft| self.waiting(ttft)) {
                computing.offer(self.score(ttft, itl), candidate);
            }
        }
        let (score, prefill) = computing.draw(self.scene.draws.prefill_tie())?;
        Some(((prefill, decode), score))
    }

    fn score(&self, ttft: f64, itl: f64) -> Score {
        Score { ttft_seconds: ttft, itl_seconds: itl, j: self.own(ttft, itl) }
    }

    /// The best local candidate that the guards allow. Harm takes a look at every sequence that
    /// streams from a worker, so it is worked out only where what it is at least leaves a chance.
    fn best_local(&self, field: &Field<'_>, scored: &mut Scored) {
        // A veto is told where it may have cost the better path.
        let margin = self.scene.settings.predicted.stickiness.get() + COLD_MARGIN;
        let remote = scored.scores.remote.map_or(f64::INFINITY, |remote| remote.j);
        let mut promising = Promising { list: [None; MAX_JUDGED], len: 0 };
        for candidate in field.candidates().filter(|candidate| candidate.local) {
            if !promising.has_room_for(self.waiting(candidate.outlook.local_ttft())) {
                continue;
            }
            let least = self.local(candidate);
            if !promising.has_room_for(least.j) {
                continue;
            }
            let checked = self.scene.check(candidate, Rule::Predicted);
            scored.fallbacks = scored.fallbacks.union(checked.fallbacks);
            if checked.vetoes.is_empty() {
                promising.put(least, candidate);
            } else if least.j <= remote + margin {
                scored.vetoes = scored.vetoes.union(checked.vetoes);
            }
        }
        let mut tied = Tied::beyond(0.0);
        for (least, candidate) in promising.list.into_iter().flatten() {
            if !tied.has_room_for(least.j) {
                break;
            }
            tied.offer(self.with_harm(candidate, least), candidate);
        }
        if let Some((score, local)) = tied.draw(self.scene.draws.decode_tie()) {
            (scored.local, scored.scores.local) = (Some(local), Some(score));
        }
    }

    /// The score of a local candidate, with the least harm that it can do.
    fn local(&self, candidate: &Candidate) -> Score {
        let outlook = &candidate.outlook;
        let own = self.score(outlook.local_ttft(), outlook.step);
        let setting = self.setting(outlook);
        let predictor = self.scene.predictor;
        Score {
            j: own.j + predictor.harm_at_least(candidate.slot, outlook.compute, &setting),
            ..own
        }
    }

    fn with_harm(&self, candidate: &Candidate, least: Score) -> Score {
        let outlook = &candidate.outlook;
        let setting = self.setting(outlook);
        let beyond =
            self.scene.predictor.harm_beyond_least(candidate.slot, outlook.compute, &setting);
        Score { j: least.j + beyond, ..least }
    }

    fn setting(&self, outlook: &Outlook) -> Setting {
        Setting {
            now: self.now,
            wait: outlook.wait,
            step: outlook.others,
            width: self.width,
            per_second: self.scene.settings.predicted.lambda.get() / self.ttft_slo.unwrap_or(1.0),
        }
    }
}

/// The score of the local path on one candidate, for records.
pub(crate) fn local_score(scene: &Scene<'_>, candidate: &Candidate) -> Score {
    let scorer = Scorer::new(scene, true);
    scorer.with_harm(candidate, scorer.local(candidate))
}

/// The local candidates with the least J before harm to SLOs, lowest first.
struct Promising<'a> {
    list: [Option<(Score, &'a Candidate)>; MAX_JUDGED],
    len: usize,
}

impl<'a> Promising<'a> {
    fn has_room_for(&self, j: f64) -> bool {
        let last = self.list.last().copied().flatten();
        j.is_finite() && last.is_none_or(|(score, _)| j < score.j)
    }

    fn put(&mut self, score: Score, candidate: &'a Candidate) {
        let mut at = self.len.min(MAX_JUDGED - 1);
        while at > 0
            && let Some((before, _)) = self.list[at - 1]
            && before.j > score.j
        {
            self.list[at] = self.list[at - 1];
            at -= 1;
        }
        self.list[at] = Some((score, candidate));
        self.len = (self.len + 1).min(MAX_JUDGED);
    }
}

/// Candidates that are as good as the best.
struct Tied<'a> {
    best: f64,
    /// What of every score lies in other things than the choice; the margin is a share of the rest.
    common: f64,
    /// TTFT and ITL of the best.
    times: (f64, f64),
    list: [Option<(Score, &'a Candidate)>; MAX_TIED],
    len: usize,
}

impl<'a> Tied<'a> {
    fn beyond(common: f64) -> Tied<'a> {
        Tied {
            best: f64::INFINITY,
            common,
            times: (f64::INFINITY, f64::INFINITY),
            list: [None; MAX_TIED],
            len: 0,
        }
    }

    fn margin(&self) -> f64 {
        TIE * (self.best - self.common).abs()
    }

    /// What is no number is never among them.
    fn has_room_for(&self, j: f64) -> bool {
        j.is_finite() && (self.best.is_infinite() || j <= self.best + self.margin())
    }

    /// Whether the best is better than what has these times, as can be told without scoring it: no
    /// faster stream, and a first token so much later that `waiting` alone puts it beyond the margin.
    fn beats(&self, ttft: f64, itl: f64, waiting: impl Fn(f64) -> f64) -> bool {
        let (best_ttft, best_itl) = self.times;
        itl >= best_itl && waiting(ttft) - waiting(best_ttft) > self.margin()
    }

    fn offer(&mut self, score: Score, candidate: &'a Candidate) {
        if !self.has_room_for(score.j) {
            return;
        }
        if score.j < self.best {
            self.best = score.j;
            self.times = (score.ttft_seconds, score.itl_seconds);
            let held = std::mem::take(&mut self.len);
            for at in 0..held {
                if let Some((score, candidate)) = self.list[at]
                    && self.has_room_for(score.j)
                {
                    self.push(score, candidate);
                }
            }
        }
        self.push(score, candidate);
    }

    fn push(&mut self, score: Score, candidate: &'a Candidate) {
        if let Some(place) = self.list.get_mut(self.len) {
            *place = Some((score, candidate));
            self.len += 1;
        }
    }

    /// One of them, by a number from 0 to 1.
    fn draw(&self, draw: f64) -> Option<(Score, Candidate)> {
        let place = (draw * self.len as f64) as usize;
        let (score, candidate) = (*self.list.get(place.min(self.len.checked_sub(1)?))?)?;
        Some((score, *candidate))
    }
}

/// Whether the local score is the lower one; equal ones are drawn.
pub(crate) fn local_is_better(local: f64, remote: f64, draw: f64) -> bool {
    let best = local.min(remote);
    if (local - remote).abs() <= TIE * best.abs() { draw < 0.5 } else { local < remote }
}
