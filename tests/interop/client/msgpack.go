package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// A field of a map. Maps are written as lists of fields, so that their bytes are always the same.
type field struct {
	key   string
	value any
}

// maxDepth bounds the nesting of what is decoded; answers have three levels.
const maxDepth = 16

// pack appends one value in msgpack's shortest form: uint64, string (str), []byte (bin), []any or []field (a map).
func pack(out []byte, value any) []byte {
	switch v := value.(type) {
	case uint64:
		return packUint(out, v)
	case string:
		return append(packHead(out, len(v), 0xa0, 32, [3]byte{0xd9, 0xda, 0xdb}), v...)
	case []byte:
		return append(packHead(out, len(v), 0, 0, [3]byte{0xc4, 0xc5, 0xc6}), v...)
	case []any:
		out = packHead(out, len(v), 0x90, 16, [3]byte{0, 0xdc, 0xdd})
		for _, item := range v {
			out = pack(out, item)
		}
		return out
	case []field:
		out = packHead(out, len(v), 0x80, 16, [3]byte{0, 0xde, 0xdf})
		for _, f := range v {
			out = pack(pack(out, f.key), f.value)
		}
		return out
	}
	panic(fmt.Sprintf("msgpack: cannot write a %T", value))
}

// packHead writes the type and the length: in one byte below the limit of the short form, else as 1, 2 or 4 bytes,
// whichever the type has and is enough. A code of 0 says that the type has no such form.
func packHead(out []byte, n int, short byte, limit int, codes [3]byte) []byte {
	switch {
	case n < limit:
		return append(out, short|byte(n))
	case n < 1<<8 && codes[0] != 0:
		return append(out, codes[0], byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(out, codes[1]), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(out, codes[2]), uint32(n))
}

func packUint(out []byte, v uint64) []byte {
	switch {
	case v < 1<<7:
		return append(out, byte(v))
	case v < 1<<8:
		return append(out, 0xcc, byte(v))
	case v < 1<<16:
		return binary.BigEndian.AppendUint16(append(out, 0xcd), uint16(v))
	case v < 1<<32:
		return binary.BigEndian.AppendUint32(append(out, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(out, 0xcf), v)
}

var errTorn = errors.New("msgpack: the header ends in the middle of a value")

type unpacker struct{ rest []byte }

// unpackMap reads a header: one map with text keys, and nothing behind it.
func unpackMap(data []byte) (map[string]any, error) {
	u := unpacker{data}
	value, err := u.value(0)
	if err != nil {
		return nil, err
	}
	m, ok := value.(map[string]any)
	if !ok || len(u.rest) != 0 {
		return nil, errors.New("msgpack: the header is not one map")
	}
	return m, nil
}

func (u *unpacker) take(n uint64) ([]byte, error) {
	if n > uint64(len(u.rest)) {
		return nil, errTorn
	}
	taken := u.rest[:n]
	u.rest = u.rest[n:]
	return taken, nil
}

// uint reads a big endian number of so many bytes.
func (u *unpacker) uint(bytes uint64) (uint64, error) {
	raw, err := u.take(bytes)
	number := uint64(0)
	for _, b := range raw {
		number = number<<8 | uint64(b)
	}
	return number, err
}

// value reads a value: uint64, int64 (negative), string, []byte, []any, map[string]any, or what an unknown field may
// have besides: nil, bool, float64.
func (u *unpacker) value(depth int) (any, error) {
	head, err := u.uint(1)
	if err != nil {
		return nil, err
	}
	if depth > maxDepth {
		return nil, errors.New("msgpack: nested too deep")
	}
	switch {
	case head < 0x80:
		return head, nil
	case head < 0x90:
		return u.mapping(head&0x0f, depth)
	case head < 0xa0:
		return u.list(head&0x0f, depth)
	case head < 0xc0:
		raw, err := u.take(head & 0x1f)
		return string(raw), err
	case head >= 0xe0:
		return int64(int8(head)), nil
	}
	return u.longValue(head, depth)
}

// longValue reads what follows a type of a whole byte; a length or a number comes first, 2^(code-first) bytes of it.
func (u *unpacker) longValue(head uint64, depth int) (any, error) {
	sized := func(first, bytes uint64) (uint64, error) { return u.uint(bytes << (head - first)) }
	switch {
	case head == 0xc0:
		return nil, nil
	case head == 0xc2 || head == 0xc3:
		return head == 0xc3, nil
	case head >= 0xc4 && head <= 0xc6:
		n, err := sized(0xc4, 1)
		if err != nil {
			return nil, err
		}
		return u.take(n)
	case head == 0xca:
		n, err := u.uint(4)
		return float64(math.Float32frombits(uint32(n))), err
	case head == 0xcb:
		n, err := u.uint(8)
		return math.Float64frombits(n), err
	case head >= 0xcc && head <= 0xcf:
		return sized(0xcc, 1)
	case head >= 0xd0 && head <= 0xd3:
		n, err := sized(0xd0, 1)
		unused := 64 - 8<<(head-0xd0)
		if signed := int64(n<<unused) >> unused; signed < 0 {
			return signed, err
		}
		return n, err
	case head >= 0xd9 && head <= 0xdb:
		n, err := sized(0xd9, 1)
		if err != nil {
			return nil, err
		}
		raw, err := u.take(n)
		return string(raw), err
	case head == 0xdc || head == 0xdd:
		n, err := sized(0xdc, 2)
		if err != nil {
			return nil, err
		}
		return u.list(n, depth)
	case head == 0xde || head == 0xdf:
		n, err := sized(0xde, 2)
		if err != nil {
			return nil, err
		}
		return u.mapping(n, depth)
	}
	return nil, fmt.Errorf("msgpack: type 0x%02x has no place in a header", head)
}

func (u *unpacker) list(n uint64, depth int) (any, error) {
	items := []any{}
	for ; n > 0; n-- {
		item, err := u.value(depth + 1)
		if err != nil {
			return nil, err
		}
		items = append(items, item)
	}
	return items, nil
}

func (u *unpacker) mapping(n uint64, depth int) (any, error) {
	fields := map[string]any{}
	for ; n > 0; n-- {
		key, err := u.value(depth + 1)
		if err != nil {
			return nil, err
		}
		text, ok := key.(string)
		if !ok {
			return nil, errors.New("msgpack: a key is not text")
		}
		if fields[text], err = u.value(depth + 1); err != nil {
			return nil, err
		}
	}
	return fields, nil
}
