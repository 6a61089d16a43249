#ifndef FULLSHARD_IO_PICKLE_FORMAT_H_
#define FULLSHARD_IO_PICKLE_FORMAT_H_

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace fullshard::internal {

// The opcodes of pickle protocol 2 that checkpoints use (Lib/pickle.py).
enum class Opcode : unsigned char {
  kMark = '(',
  kStop = '.',
  kBinint = 'J',
  kBinint1 = 'K',
  kBinint2 = 'M',
  kNone = 'N',
  kBinpersid = 'Q',
  kReduce = 'R',
  kBinstring = 'T',
  kShortBinstring = 'U',
  kBinunicode = 'X',
  kBinfloat = 'G',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kAppends = 'e',
  kBinget = 'h',
  kLongBinget = 'j',
  kBinput = 'q',
  kLongBinput = 'r',
  kSetitem = 's',
  kTuple = 't',
  kSetitems = 'u',
  kEmptyDict = '}',
  kEmptyList = ']',
  kEmptyTuple = ')',
  kProto = 0x80,
  kNewobj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewtrue = 0x88,
  kNewfalse = 0x89,
  kLong1 = 0x8a,
  // Protocol 4.
  kShortBinunicode = 0x8c,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
};

// A global as it follows kGlobal: module, newline, name.
constexpr char kOrderedDict[] = "collections\nOrderedDict";
constexpr char kRebuildTensor[] = "torch._utils\n_rebuild_tensor";
constexpr char kRebuildTensorV2[] = "torch._utils\n_rebuild_tensor_v2";
constexpr char kRebuildTensorV3[] = "torch._utils\n_rebuild_tensor_v3";
constexpr char kRebuildParameter[] = "torch._utils\n_rebuild_parameter";
constexpr char kSize[] = "torch\nSize";
constexpr char kDevice[] = "torch\ndevice";
constexpr char kUntypedStorage[] = "torch.storage\nUntypedStorage";
constexpr char kTorchPrefix[] = "torch\n";
// Of torch.distributed.checkpoint.
constexpr char kDcpMetadataPrefix[] = "torch.distributed.checkpoint.metadata\n";
constexpr char kDcpStorageInfo[] =
    "torch.distributed.checkpoint.filesystem\n_StorageInfo";
constexpr char kGetLayout[] = "torch.serialization\n_get_layout";
constexpr char kGetattr[] = "builtins\ngetattr";

inline bool is_posix_path(absl::string_view global) {
  return global == "pathlib\nPosixPath" ||
         global == "pathlib._local\nPosixPath";
}

// "torch\nFloatStorage" as "FloatStorage"; empty for other modules.
inline absl::string_view strip_torch(absl::string_view global) {
  const absl::string_view prefix = kTorchPrefix;
  return absl::StartsWith(global, prefix) ? global.substr(prefix.size())
                                          : absl::string_view();
}

}  // namespace fullshard::internal

#endif  // FULLSHARD_IO_PICKLE_FORMAT_H_
