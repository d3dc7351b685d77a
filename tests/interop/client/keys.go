package main

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"sort"
)

const (
	tenantBytes    = 16
	namespaceBytes = 16
	hashBytes      = 32
	headerBytes    = 96
	coveredBytes   = 88 // of the header: those in front of the checksum
)

// A namespace's parts, in the order in which they are packed.
type namespace struct {
	WeightsDigest  []byte `json:"weights_digest"`
	DType          string `json:"dtype"`
	KVDType        string `json:"kv_dtype"`
	PhysicalLayout string `json:"physical_layout"`
	Backend        string `json:"backend"`
	NumLayers      uint64 `json:"num_layers"`
	NumKVHeads     uint64 `json:"num_kv_heads"`
	HeadDim        uint64 `json:"head_dim"`
	TPSize         uint64 `json:"tp_size"`
	TPRank         uint64 `json:"tp_rank"`
	PPSize         uint64 `json:"pp_size"`
	PPRank         uint64 `json:"pp_rank"`
	KVGroup        uint64 `json:"kv_group"`
	LossyCodec     string `json:"lossy_codec"`
	LayoutVersion  uint64 `json:"layout_version"`
}

// An extra is what a block depends on besides its tokens.
type extra struct {
	Kind   string `json:"kind"`
	Data   []byte `json:"data"`
	Offset uint64 `json:"offset"`
}

func tenantID(name string) []byte {
	sum := sha256.Sum256([]byte("kvtier.tenant.v1" + name))
	return sum[:tenantBytes]
}

func (n namespace) id() []byte {
	sum := sha256.Sum256(pack(nil, []any{
		"kvtier.namespace.v1", n.WeightsDigest, n.DType, n.KVDType, n.PhysicalLayout, n.Backend,
		n.NumLayers, n.NumKVHeads, n.HeadDim, n.TPSize, n.TPRank, n.PPSize, n.PPRank, n.KVGroup,
		n.LossyCodec, n.LayoutVersion,
	}))
	return sum[:namespaceBytes]
}

func keyed(key []byte, message []byte) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write(message)
	return mac.Sum(nil)
}

func chainRoot(secret []byte, salt string, tokensPerBlock uint32) []byte {
	message := binary.LittleEndian.AppendUint32([]byte("kvtier.root.v1"), tokensPerBlock)
	message = binary.LittleEndian.AppendUint32(message, uint32(len(salt)))
	return keyed(secret, append(message, salt...))
}

// chainHashes is the hash of each full block of the tokens. extras has those of a block by the block's number.
func chainHashes(root []byte, tokens []uint32, tokensPerBlock int, extras map[int][]extra) [][]byte {
	previous := make([]byte, hashBytes)
	hashes := [][]byte{}
	for first := 0; first+tokensPerBlock <= len(tokens); first += tokensPerBlock {
		message := append(append([]byte{}, root...), previous...)
		for _, token := range tokens[first : first+tokensPerBlock] {
			message = binary.LittleEndian.AppendUint32(message, token)
		}
		packed := packExtras(extras[first/tokensPerBlock])
		message = binary.LittleEndian.AppendUint32(message, uint32(len(packed)))
		sum := sha256.Sum256(append(message, packed...))
		previous = sum[:]
		hashes = append(hashes, previous)
	}
	return hashes
}

func packExtras(extras []extra) []byte {
	if len(extras) == 0 {
		return nil
	}
	sorted := append([]extra{}, extras...)
	sort.Slice(sorted, func(i, j int) bool {
		a, b := sorted[i], sorted[j]
		if a.Offset != b.Offset {
			return a.Offset < b.Offset
		}
		if a.Kind != b.Kind {
			return a.Kind < b.Kind
		}
		return string(a.Data) < string(b.Data)
	})
	items := []any{}
	for _, e := range sorted {
		items = append(items, []any{e.Kind, e.Data, e.Offset})
	}
	return pack(nil, items)
}

func externalKey(root []byte, digest []byte) []byte {
	return keyed(root, append([]byte("kvtier.ext.v1"), digest...))
}

func storeKey(tenant, namespaceID, hash []byte) []byte {
	return append(append(append([]byte{}, tenant...), namespaceID...), hash...)
}

// blockHeader is the stored form's header, version 1 and raw, with the checksum of the payload.
func blockHeader(key, payload []byte) []byte {
	header := append([]byte("KVTB\x01\x00\x00\x00"), key...)
	header = binary.LittleEndian.AppendUint64(header, uint64(len(payload)))
	header = binary.LittleEndian.AppendUint64(header, uint64(len(payload)))
	covered := append(append(make([]byte, 0, coveredBytes+len(payload)), header...), payload...)
	return binary.LittleEndian.AppendUint64(header, xxh3(covered))
}

// verify says whether a header and a payload that came are the block of the key. As a raw header follows from key and
// payload alone, all 96 bytes are compared at once.
func verify(key, header, payload []byte) bool {
	return bytes.Equal(header, blockHeader(key, payload))
}
