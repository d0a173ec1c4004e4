//! Reads and checks the configuration of the plugin `bandwidth`.

use cni::config::NetConf;
use cni::{Error, Result};
use cni_linux::Tbf;
use cni_linux::qdisc::TICK;
use serde::Deserialize;

/// A checked configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conf {
    /// The limit for packets that the container receives, or `None` for no limit.
    pub(crate) ingress: Option<Limit>,
    /// The limit for packets that the container sends, or `None` for no limit.
    pub(crate) egress: Option<Limit>,
}

/// A limit of the rate in one direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    /// Bytes per second, at least 1.
    rate: u64,
    /// The bytes that may be sent at once after a pause.
    burst: u64,
}

/// The keys of the configuration. Rates are in bits per second, bursts in bits.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Keys {
    ingress_rate: Option<u64>,
    ingress_burst: Option<u64>,
    egress_rate: Option<u64>,
    egress_burst: Option<u64>,
    runtime_config: RuntimeConfig,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RuntimeConfig {
    bandwidth: BandwidthCapability,
}

/// The capability `bandwidth`, in the units of [`Keys`].
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct BandwidthCapability {
    ingress_rate: u64,
    ingress_burst: u64,
    egress_rate: u64,
    egress_burst: u64,
}

impl Conf {
    /// Reads the limits from the configuration. If at least one of the four keys is set outside
    /// `runtimeConfig`, `runtimeConfig.bandwidth` is ignored, as in Go's plugin.
    ///
    /// # Errors
    /// - Code 6 if a key has the wrong type.
    /// - Code 7 if a rate has no burst, a burst has no rate, or a number is too large or too small.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let keys: Keys = conf.decode_chained()?;
        let configured = [keys.ingress_rate, keys.ingress_burst, keys.egress_rate, keys.egress_burst];
        let runtime = keys.runtime_config.bandwidth;
        let [ingress_rate, ingress_burst, egress_rate, egress_burst] = if configured.iter().any(Option::is_some) {
            configured.map(Option::unwrap_or_default)
        } else {
            [runtime.ingress_rate, runtime.ingress_burst, runtime.egress_rate, runtime.egress_burst]
        };
        Ok(Conf {
            ingress: Limit::new("ingress", ingress_rate, ingress_burst)?,
            egress: Limit::new("egress", egress_rate, egress_burst)?,
        })
    }
}

impl Limit {
    /// Returns the limit for a rate in bits per second and a burst in bits, or `None` if both are
    /// 0. `direction` is `ingress` or `egress`.
    ///
    /// # Errors
    /// Code 7 if only one of them is 0, or if one is too large or too small.
    fn new(direction: &str, rate: u64, burst: u64) -> Result<Option<Limit>> {
        match (rate, burst) {
            (0, 0) => return Ok(None),
            (_, 0) => return Err(Error::config("if rate is set, burst must also be set")),
            (0, _) => return Err(Error::config("if burst is set, rate must also be set")),
            _ => {}
        }
        let limit = Limit { rate: rate / 8, burst: burst / 8 };
        if limit.burst >= u64::from(u32::MAX) {
            return Err(Error::config("burst cannot be more than 4GB"));
        }
        if limit.rate == 0 {
            return Err(Error::config(format!("{direction}Rate {rate} is too small: the least is 8 bits per second")));
        }
        if limit.bucket_size() == 0 {
            let msg = format!("{direction}Burst {burst} is too small for a rate of {rate} bits per second");
            return Err(
                Error::config(msg).with_details("the kernel would send no packet at all; request a larger burst")
            );
        }
        Ok(Some(limit))
    }

    /// Returns the microseconds in which the rate fills a bucket of the size of the burst. Like
    /// Go's plugin, rounds down to whole microseconds.
    fn fill_time(self) -> u64 {
        self.burst * 1_000_000 / self.rate
    }

    /// Returns the length of the queue in bytes, as Go's plugin computes it: the burst plus the
    /// bytes that the rate sends in 25 ms.
    fn queue_length(self) -> u128 {
        u128::from(self.rate) / 40 + u128::from(self.burst)
    }

    /// Returns the parameters of the kernel's token bucket filter. `limit` and `buffer` have 32
    /// bits; larger numbers are reduced to `u32::MAX`.
    pub(crate) fn tbf(self) -> Tbf {
        Tbf {
            rate: self.rate,
            limit: u32::try_from(self.queue_length()).unwrap_or(u32::MAX),
            buffer: u32::try_from(ticks(self.fill_time())).unwrap_or(u32::MAX),
        }
    }

    /// Returns the parameters that Go's plugin sets. They differ from those of [`tbf`](Limit::tbf)
    /// only if a number does not fit into 32 bits: Go's plugin keeps the lowest 32 bits of it.
    #[expect(clippy::cast_possible_truncation, reason = "Go's plugin truncates")]
    pub(crate) fn tbf_of_go(self) -> Tbf {
        let fill_time = self.fill_time() as u32;
        Tbf { rate: self.rate, limit: self.queue_length() as u32, buffer: ticks(fill_time.into()) as u32 }
    }

    /// Returns the size of the kernel's bucket in bytes: the burst, or less if the burst does not
    /// fit into the 32 bits of [`Tbf::buffer`]. With 0, the kernel would send no packet.
    pub(crate) fn bucket_size(self) -> u128 {
        u128::from(self.tbf().buffer) * u128::from(TICK) * u128::from(self.rate) / 1_000_000_000
    }

    /// Returns a note for stderr if the burst does not fit into the 32 bits of [`Tbf::buffer`].
    pub(crate) fn note_of_reduced_burst(self) -> Option<String> {
        // The two only differ if the burst does not fit: `tbf` has the maximum, and Go's plugin
        // truncates the number.
        if self.tbf().buffer == self.tbf_of_go().buffer {
            return None;
        }
        let Limit { rate, burst } = self;
        Some(format!(
            "a burst of {burst} bytes at {rate} bytes per second is too large for the kernel: it is reduced to {} bytes",
            self.bucket_size()
        ))
    }
}

/// Converts microseconds to ticks of the kernel's packet scheduler.
fn ticks(microseconds: u64) -> u64 {
    microseconds * 1000 / TICK
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(keys: &str) -> Result<Conf> {
        Conf::new(&NetConf::parse(format!(r#"{{"cniVersion":"1.0.0","name":"n","type":"bandwidth"{keys}}}"#))?)
    }

    fn ingress(rate: u64, burst: u64) -> Limit {
        parse(&format!(r#","ingressRate":{rate},"ingressBurst":{burst}"#)).unwrap().ingress.unwrap()
    }

    /// The figures were read from the kernel after Go's ADD.
    #[test]
    fn numbers_equal_those_of_go() {
        for (rate, burst, tbf) in [
            (8, 8, Tbf { rate: 1, limit: 1, buffer: 15_625_000 }),
            (16, 8, Tbf { rate: 2, limit: 1, buffer: 7_812_500 }),
            (8000, 80, Tbf { rate: 1000, limit: 35, buffer: 156_250 }),
            (8_000_000, 800_000, Tbf { rate: 0xf_4240, limit: 0x1_e848, buffer: 0x17_d784 }),
        ] {
            let limit = ingress(rate, burst);
            assert_eq!(
                (limit.tbf(), limit.tbf_of_go(), limit.note_of_reduced_burst()),
                (tbf, tbf, None),
                "{rate} {burst}"
            );
        }
    }

    #[test]
    fn values_too_large_for_the_kernel_become_the_largest() {
        // As containerd asks for 10 Mbit/s, and CRI-O.
        let limit = ingress(10_000_000, u32::MAX.into());
        assert_eq!((limit.tbf().buffer, limit.tbf_of_go().buffer), (u32::MAX, 2_415_919_079));
        assert_eq!(limit.tbf().limit, limit.tbf_of_go().limit);
        assert!(limit.note_of_reduced_burst().unwrap().ends_with("reduced to 343597383 bytes"));
        let limit = ingress(12_345_678, 8 * u64::from(u32::MAX) - 1);
        assert_eq!((limit.tbf().limit, limit.tbf_of_go().limit), (u32::MAX, 38_578));
        // Here only the queue is too long: the bucket is as large as requested.
        let long_queue = ingress(8_000_000_000_000, 8_000_000);
        assert_eq!((long_queue.tbf().limit, long_queue.note_of_reduced_burst()), (u32::MAX, None));
        let huge = ingress(80_000_000_000_000, 8_000_000_000).tbf();
        assert_eq!((huge.rate, huge.limit), (10_000_000_000_000, u32::MAX));
    }

    #[test]
    fn one_key_of_the_list_overrides_all_of_the_runtime() {
        let runtime = r#","RuntimeConfig":{"bandWidth":{"ingressRate":800,"ingressBurst":800,"egressRate":1600,"egressBurst":8}}"#;
        let conf = parse(runtime).unwrap();
        assert_eq!(conf.egress.unwrap().tbf().rate, 200);
        let conf = parse(&format!(r#"{runtime},"egressRate":0"#)).unwrap();
        assert!(conf.ingress.is_none() && conf.egress.is_none());
        let conf = parse(&format!(r#"{runtime},"ingressRate":80,"ingressBurst":80"#)).unwrap();
        assert!(conf.ingress.unwrap().tbf().rate == 10 && conf.egress.is_none());
        for none in ["", r#","runtimeConfig":{"bandwidth":null}"#, r#","runtimeConfig":{"bandwidth":{}}"#] {
            assert!(parse(none).is_ok_and(|conf| conf.ingress.is_none() && conf.egress.is_none()), "{none}");
        }
    }

    #[test]
    fn impossible_limits_are_refused() {
        for (keys, code, begin) in [
            (r#","ingressRate":8"#, 7, "if rate is set, burst must also be set"),
            (r#","egressBurst":8"#, 7, "if burst is set, rate must also be set"),
            (r#","egressRate":8,"egressBurst":34359738360"#, 7, "burst cannot be more than 4GB"),
            (r#","egressRate":7,"egressBurst":8"#, 7, "egressRate 7 is too small"),
            (r#","ingressRate":80000000,"ingressBurst":7"#, 7, "ingressBurst 7 is too small"),
            (r#","ingressRate":80000000000,"ingressBurst":8"#, 7, "ingressBurst 8 is too small"),
            (r#","ingressRate":-1"#, 6, "failed to parse network configuration: ingressRate"),
            (r#","ingressRate":1.5"#, 6, "failed to parse network configuration: ingressRate"),
            (
                r#","runtimeConfig":{"bandwidth":{"egressRate":"1M"}}"#,
                6,
                "failed to parse network configuration: runtimeConfig.bandwidth.egressRate",
            ),
        ] {
            let error = parse(keys).unwrap_err();
            assert!(error.code().0 == code && error.msg().starts_with(begin), "{keys}: {error}");
        }
        assert!(parse(r#","egressRate":8,"egressBurst":34359738359"#).is_ok());
    }
}
