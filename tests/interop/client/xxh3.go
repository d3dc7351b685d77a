package main

import (
	"encoding/binary"
	"encoding/hex"
	"math/bits"
)

// The constants of xxHash's specification: the default secret of XXH3, and its primes.
var xxh3Secret = mustHex("b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f" +
	"cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c" +
	"3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8" +
	"fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364ea" +
	"c5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b" +
	"16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")

const (
	prime32x1 = 0x9E3779B1
	prime32x2 = 0x85EBCA77
	prime32x3 = 0xC2B2AE3D
	prime64x1 = 0x9E3779B185EBCA87
	prime64x2 = 0xC2B2AE3D27D4EB4F
	prime64x3 = 0x165667B19E3779F9
	prime64x4 = 0x85EBCA77C2B2AE63
	prime64x5 = 0x27D4EB2F165667C5
	primeMix  = 0x165667919E3779F9

	stripeBytes     = 64
	stripesPerBlock = 16
	blockBytes      = stripeBytes * stripesPerBlock
)

func mustHex(text string) []byte {
	raw, err := hex.DecodeString(text)
	if err != nil {
		panic(err)
	}
	return raw
}

// xxh3 is XXH3 with 64 bits, seed 0 and the default secret, of 17 bytes or more. A block's checksum covers 88 bytes
// at least, so the formulas for shorter inputs are left out.
func xxh3(data []byte) uint64 {
	switch {
	case len(data) <= 16:
		panic("xxh3: fewer bytes than any checksum covers")
	case len(data) <= 128:
		return xxh3Short(data)
	case len(data) <= 240:
		return xxh3Middle(data)
	}
	return xxh3Long(data)
}

func word(data []byte, at int) uint64 { return binary.LittleEndian.Uint64(data[at:]) }

func fold(a, b uint64) uint64 {
	high, low := bits.Mul64(a, b)
	return high ^ low
}

func avalanche(h uint64) uint64 {
	h ^= h >> 37
	h *= primeMix
	return h ^ h>>32
}

func mix16(data []byte, at, secret int) uint64 {
	return fold(word(data, at)^word(xxh3Secret, secret), word(data, at+8)^word(xxh3Secret, secret+8))
}

func xxh3Short(data []byte) uint64 {
	n := len(data)
	h := uint64(n) * prime64x1
	for i := (n - 1) / 32; i >= 0; i-- {
		h += mix16(data, 16*i, 32*i) + mix16(data, n-16*(i+1), 32*i+16)
	}
	return avalanche(h)
}

func xxh3Middle(data []byte) uint64 {
	n := len(data)
	h := uint64(n) * prime64x1
	for i := 0; i < 8; i++ {
		h += mix16(data, 16*i, 16*i)
	}
	h = avalanche(h)
	for i := 8; i < n/16; i++ {
		h += mix16(data, 16*i, 16*(i-8)+3)
	}
	return avalanche(h + mix16(data, n-16, 136-17))
}

func xxh3Long(data []byte) uint64 {
	n := len(data)
	lanes := [8]uint64{prime32x3, prime64x1, prime64x2, prime64x3, prime64x4, prime32x2, prime64x5, prime32x1}
	scrambleAt := len(xxh3Secret) - stripeBytes
	for stripe := 0; stripe < (n-1)/stripeBytes; stripe++ {
		inBlock := stripe % stripesPerBlock
		accumulate(&lanes, data[stripe*stripeBytes:], 8*inBlock)
		if inBlock == stripesPerBlock-1 {
			for i := range lanes {
				lanes[i] ^= lanes[i] >> 47
				lanes[i] ^= word(xxh3Secret, scrambleAt+8*i)
				lanes[i] *= prime32x1
			}
		}
	}
	accumulate(&lanes, data[n-stripeBytes:], scrambleAt-7)
	h := uint64(n) * prime64x1
	for i := 0; i < 4; i++ {
		h += fold(lanes[2*i]^word(xxh3Secret, 11+16*i), lanes[2*i+1]^word(xxh3Secret, 19+16*i))
	}
	return avalanche(h)
}

func accumulate(lanes *[8]uint64, stripe []byte, secret int) {
	for i := range lanes {
		value := word(stripe, 8*i)
		key := value ^ word(xxh3Secret, secret+8*i)
		lanes[i^1] += value
		lanes[i] += (key & 0xffffffff) * (key >> 32)
	}
}
