//! Hand-made packets, each behind an Ethernet header.

/// Source of [`v4`] packets.
pub const FROM4: [u8; 4] = [10, 66, 0, 2];
/// Where they go.
pub const TO4: [u8; 4] = [192, 0, 2, 1];
/// Source of [`v6`] packets.
pub const FROM6: [u8; 16] = [0xfd, 0x66, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];
/// Where they go.
pub const TO6: [u8; 16] = [0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

/// TCP flags.
pub const SYN: u8 = 0x02;
/// TCP flags.
pub const ACK: u8 = 0x10;

/// Adds the Ethernet header that says what an IP packet's first byte says.
pub fn ethernet(ip: &[u8]) -> Vec<u8> {
    let kind: [u8; 2] = if ip.first().is_some_and(|byte| byte >> 4 == 6) { [0x86, 0xdd] } else { [8, 0] };
    [&[0; 12], kind.as_slice(), ip].concat()
}

/// A packet from [`FROM4`] to `to`, with `options` bytes of no-operation options.
pub fn v4_to(to: [u8; 4], protocol: u8, options: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let header = 20 + options;
    let length = u16::try_from(usize::from(header) + payload.len()).unwrap().to_be_bytes();
    let mut ip = vec![0x40 | (header / 4), 0, length[0], length[1], 0, 1];
    ip.extend(fragment.to_be_bytes());
    ip.extend([64, protocol, 0, 0]);
    ip.extend(FROM4.iter().chain(&to));
    ip.extend(vec![1; options.into()]);
    ip.extend(payload);
    ethernet(&ip)
}

/// As [`v4_to`], to [`TO4`] and without options.
pub fn v4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    v4_to(TO4, protocol, 0, 0, payload)
}

/// A packet from [`FROM6`] to `to`.
pub fn v6_to(to: [u8; 16], next: u8, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).unwrap().to_be_bytes();
    let mut ip = vec![0x60, 0, 0, 0, length[0], length[1], next, 64];
    ip.extend(FROM6.iter().chain(&to).chain(payload));
    ethernet(&ip)
}

/// As [`v6_to`], to [`TO6`].
pub fn v6(next: u8, payload: &[u8]) -> Vec<u8> {
    v6_to(TO6, next, payload)
}

/// A TCP header with these flags, from port 40000 to `port`.
pub fn tcp(flags: u8, port: u16) -> Vec<u8> {
    let [high, low] = port.to_be_bytes();
    vec![0x9c, 0x40, high, low, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]
}

/// A UDP datagram to `port`.
pub fn udp(port: u16) -> Vec<u8> {
    let [high, low] = port.to_be_bytes();
    vec![0x9c, 0x40, high, low, 0, 12, 0, 0, 1, 2, 3, 4]
}

/// An IPv6 extension header of eight bytes.
pub fn extension(next: u8, bytes: [u8; 3]) -> Vec<u8> {
    vec![next, 0, bytes[0], bytes[1], bytes[2], 0, 0, 0]
}

/// Deterministic noise (xorshift64*).
pub struct Noise(pub u64);

impl Noise {
    fn next(&mut self) -> u8 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d).to_be_bytes()[0]
    }

    /// IP of `len` bytes: noise, but mostly with a first byte and a protocol that lead somewhere.
    pub fn packet(&mut self, len: usize) -> Vec<u8> {
        let mut ip: Vec<u8> = (0..len).map(|_| self.next()).collect();
        let pick = |noise: &mut Self, from: &[u8]| from[usize::from(noise.next()) % from.len()];
        if let Some(first) = ip.first_mut()
            && !self.next().is_multiple_of(8)
        {
            *first = pick(self, &[0x45, 0x45, 0x46, 0x4f, 0x60, 0x60, 0x44, 0x50]);
        }
        let version = ip.first().map_or(0, |first| first >> 4);
        if version == 4 && len > 9 && !self.next().is_multiple_of(8) {
            ip[9] = pick(self, &[1, 6, 6, 17, 132, 4]);
            (ip[6], ip[7]) = if !self.next().is_multiple_of(4) { (0x40, 0) } else { (ip[6], ip[7]) };
        }
        if version == 6 && len > 6 {
            ip[6] = pick(self, &[0, 6, 6, 17, 43, 44, 51, 58, 60, 59, 135]);
            // Extension headers that lead on, and are short.
            for at in (40..len).step_by(8).filter(|at| at + 1 < len) {
                (ip[at], ip[at + 1]) = (pick(self, &[6, 6, 17, 44, 51, 60, 0]), self.next() % 2);
            }
        }
        ip
    }
}
